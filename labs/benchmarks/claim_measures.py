"""The measurements of `claims`: each function is the setting of one claim, as near to its source's as possible."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, sqrt
from random import Random
from statistics import mean

from admission.step_times.step_time import StepWork
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, Traffic, drawn_trace
from labs.benchmarks.overload_runs import simulate
from labs.orderings.ordering import PublishedOrder
from labs.simulation.arrival import NO_TARGET, Arrival, sequence_of
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.pools.link import Link
from labs.simulation.pools.pools import Split, simulate_split, splits
from labs.simulation.recorder import Objective
from labs.simulation.search.sweep import KNEE_GOODPUT
from labs.simulation.study import SimulatedRun, capacity, simulate_run
from labs.simulation.summary import Summary
from labs.simulation.workload import Workload

ENGINE = "max_num_batched_tokens=512,prefill_chunk=512,overload=unbounded,prefix_cache=off"
CHUNKED = f"{ENGINE},max_num_seqs=192"
SMALL = f"{ENGINE},max_num_seqs=32"
STATIC = "batching=static,"
SLOTS = f"{ENGINE},max_num_seqs=64"
TIGHT = f"kv_tokens=20000,max_model_len=16384,{CHUNKED}"
TENANTS = ("tenant-1", "tenant-2", "tenant-3", "tenant-4")
ARENA, KINDS, NOISE = 27, 40, 0.62  # tenants, kinds of prompts, and the deviation of an answer's logarithm


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured figure to compare with the claim's, and a remark."""

    figure: float
    text: str


# requests


def _at_once(requests: Sequence[Arrival]) -> list[Arrival]:
    return [
        one._replace(time=0.0, session=n, tenant=one.tenant or TENANTS[n % 4], max_tokens=one.max_tokens or MAX_TOKENS)
        for n, one in enumerate(requests)
    ]


def _conversations(seed: int, count: float) -> list[Arrival]:
    return _at_once(Random(seed).sample(drawn_trace(), round(count)))


def _poisson(
    seed: int, load: float, seconds: float, deadline: float | None = None, traffic: Traffic | None = None
) -> list[Arrival]:
    """Conversations, or other traffic, at a multiple of what the machine completes."""
    traffic = traffic or Traffic.conversations()
    random, made, now = Random(seed), list[Arrival](), 0.0
    while (now := now + random.expovariate(load * traffic.capacity)) < seconds:
        tenant = random.choice(TENANTS)
        one = random.choice(traffic.trace)._replace(time=now, tenant=tenant, max_tokens=MAX_TOKENS)
        one = one if deadline is None else one._replace(deadline=deadline)
        made.append(one._replace(session=len(made)))
    return made


def _of_kinds(seed: int, count: float, declared: int = MAX_TOKENS) -> list[Arrival]:
    """Requests all at once, of 40 kinds by which the lengths of answers can be ranked with a tau of 0.6."""
    random, made = Random(seed), list[Arrival]()
    for number in range(round(count)):
        kind = random.randrange(40)
        prompt = random.randrange(22, 202)
        output = min(MAX_TOKENS, max(1, round(exp(3.2 + 3.2 * kind / 40 + random.gauss(0.0, 0.62)))))
        begins = (50 + kind, 150 + kind)
        made.append(Arrival(0.0, prompt, output, number, "one", max_tokens=declared, begins=begins))
    return made


def _teach(run: SimulatedRun) -> None:
    """Let the run's order learn from 3,000 like requests of another day, as papers train theirs beforehand."""
    order = run.core.order
    assert isinstance(order, PublishedOrder) and order.predicted is not None
    for one in _of_kinds(7, 3000):
        made = sequence_of(0, one, 0.0, NO_TARGET)
        order.predicted.learn(made.tenant, made.prompt, made.max_tokens, one.output_tokens)


def _policy(text: str) -> SimulatedPolicy:
    return parse_simulated_policy(text, DEVICE)


def _run(policy: str, arrivals: Sequence[Arrival]) -> Summary:
    return simulate_run(_policy(policy), arrivals, DEVICE, Objective(first_token=2.0, per_token=0.1))


def _rates(policies: Sequence[str], arrivals: Sequence[Arrival]) -> list[float]:
    """Returns the output tokens a second of each policy."""
    return [_run(policy, arrivals).output_rate for policy in policies]


# batches


def static_to_continuous(seed: int, share: float) -> Measured:
    requests = _conversations(seed, 600 * share)
    ours, theirs = _rates((f"fcfs,{SMALL}", f"fcfs,batching=static_padded,{SMALL}"), requests)
    packed = _run(f"fcfs,batching=static,{SMALL}", requests).output_rate
    return Measured(ours / theirs, f"{ours / theirs:.1f}x a padded batch, {ours / packed:.1f}x a packed one")


def continuous_tail(seed: int, share: float) -> Measured:
    """At 0.9 times what continuous batching completes of the same rows, which is more than static batches do."""
    requests = _at_once(_conversations(seed, 400 * share))
    rate = len(requests) / _run(f"fcfs,{SMALL}", requests).seconds
    random, now, spread = Random(seed), 0.0, list[Arrival]()
    for one in requests:
        spread.append(one._replace(time=(now := now + random.expovariate(0.9 * rate))))
    ours, *static = (_run(f"fcfs,{batching}{SMALL}", spread) for batching in ("", "batching=static_padded,", STATIC))
    gains = [ours.output_rate / theirs.output_rate - 1 for theirs in static]
    tails = [1 - (ours.duration.p99 or 0.0) / (theirs.duration.p99 or 1.0) for theirs in static]
    padded, packed = (f"{gain:+.0%} and -{tail:.0%} p99" for gain, tail in zip(gains, tails, strict=True))
    return Measured(gains[0], f"{padded} beside padded batches, {packed} beside packed ones")


def length_variance(seed: int, share: float) -> Measured:
    """Answers of 200 tokens on average to prompts of 200, with ever more variance."""
    gains = {}
    for variation in (0.0, 0.5, 1.0, 2.0):
        random = Random(seed)
        lengths = [_skewed(random, variation) for _ in range(round(600 * share))]
        requests = _at_once([Arrival(0.0, 200, length, max_tokens=4096) for length in lengths])
        ours, theirs = _rates((f"fcfs,{SMALL}", f"fcfs,batching=static_padded,{SMALL}"), requests)
        gains[variation] = ours / theirs
    shown = ", ".join(f"{gain:.1f}x at {variation:g}" for variation, gain in gains.items())
    return Measured(gains[2.0], f"by the coefficient of variation: {shown}")


def padding_waste(seed: int, share: float) -> Measured:
    waste = _run(f"fcfs,batching=static_padded,{SMALL}", _conversations(seed, 600 * share)).padding
    grouped = _run(f"length_groups,batching=static_padded,{SMALL}", _conversations(seed, 600 * share)).padding
    return Measured(waste, f"{waste:.0%} of computed tokens; {grouped:.0%} with prompts of like lengths together")


PREFILL_FIRST = (
    "fcfs,batching=prefill_first,overload=unbounded,prefill_chunk=off,max_num_batched_tokens=16384,max_num_seqs=192,"
    "kv_tokens=430000,max_model_len=16384,prefix_cache=off"
)


def chunked_prefill(seed: int, share: float) -> Measured:
    """Capacity as the source has it: the largest load with 99 % of tokens within 0.1 s, in steps of a tenth."""
    requests = _poisson(seed, 0.9, 200 * share)
    whole, chunked = _run(PREFILL_FIRST, requests), _run(f"fcfs,{CHUNKED}", requests)
    tail = (whole.interval.p99 or 0.0) / (chunked.interval.p99 or 1.0)
    most = {}
    for policy in (PREFILL_FIRST, f"fcfs,{CHUNKED}"):
        loads = (one / 10 for one in range(1, 12))
        runs = ((load, _run(policy, _poisson(seed, load, 100 * share))) for load in loads)
        most[policy] = _last_while(lambda run: (run.interval.p99 or 0.0) <= 0.1, runs)
    gain, rate = most[f"fcfs,{CHUNKED}"] / max(0.1, most[PREFILL_FIRST]), chunked.output_rate / whole.output_rate
    return Measured(
        gain,
        f"{gain:.1f}x capacity with 99 % of tokens within 0.1 s; at 0.9 times capacity p99 {tail:.1f}x lower, at "
        f"{rate:.3f}x the throughput",
    )


def _last_while(holds: Callable[[Summary], bool], runs: Iterable[tuple[float, Summary]]) -> float:
    """Returns the last load before the first whose run does not hold; 0 if that is the first."""
    last = 0.0
    for load, run in runs:
        if not holds(run):
            break
        last = load
    return last


def slai(seed: int, share: float) -> Measured:
    """Half of the requests want tokens 0.1 s apart, half 0.5 s."""
    random = Random(seed)
    requests = [one._replace(interval=random.choice((0.1, 0.5))) for one in _poisson(seed, 0.95, 200 * share)]
    ours, theirs = (
        _run(policy, requests).first_token
        for policy in (f"order=shortest_first,batching=slai,{CHUNKED}", f"fcfs,{CHUNKED}")
    )
    saved = 1 - (ours.p50 or 0.0) / (theirs.p50 or 1.0)
    tail = 1 - (ours.p99 or 0.0) / (theirs.p99 or 1.0)
    return Measured(saved, f"-{saved:.0%} median time to first token, {-tail:+.0%} p99")


def slai_capacity(seed: int, share: float) -> Measured:
    """The largest load, in steps of 5 %, with a median of first tokens below 0.5 s."""
    most = {}
    for policy in (f"order=shortest_first,batching=slai,{CHUNKED}", f"fcfs,{CHUNKED}"):
        loads = (one / 20 for one in range(16, 27))
        runs = ((load, _run(policy, _poisson(seed, load, 150 * share))) for load in loads)
        most[policy] = _last_while(lambda run: (run.first_token.p50 or 0.0) < 0.5, runs)
    ours, theirs = most.values()
    return Measured(
        ours / max(theirs, 0.1) - 1,
        f"{ours / max(theirs, 0.1) - 1:+.0%}: {ours:g} times capacity instead of {theirs:g}",
    )


def magnus(seed: int, share: float) -> Measured:
    """All at once: padded batches of 7, as many as the paper's engine has memory for the longest, and Magnus's own."""
    requests, memory = _of_kinds(seed, 1500 * share), "batching=static_padded,kv_tokens=40000,max_model_len=8192"
    few, own = f"{memory},{ENGINE},max_num_seqs=7", f"{memory},{ENGINE},max_num_seqs=64"
    taught = SimulatedRun(_policy(f"magnus,{own}"), requests, DEVICE, Objective())
    _teach(taught)
    _finish(taught)
    ours, theirs = taught.summary().output_rate, _run(f"fcfs,{few}", requests).output_rate
    continuous = _run(f"fcfs,kv_tokens=40000,max_model_len=8192,{SLOTS}", requests).output_rate
    gain = ours / theirs - 1
    return Measured(gain, f"{gain:+.0%} beside batches of 7; continuous batching has {continuous / ours:.1f}x of that")


def wait(seed: int, share: float) -> Measured:
    """A quarter of the memory that conversations at this load would hold."""
    requests, memory = _poisson(seed, 1.1, 150 * share), "memory=optimistic,kv_tokens=60000,max_model_len=16384"
    rules = ("wait", "nested_wait", "continuous")
    runs = {rule: _run(f"fcfs,batching={rule},{memory},{CHUNKED}", requests) for rule in rules}
    rate = {rule: run.output_rate / runs["continuous"].output_rate for rule, run in runs.items()}
    shown = ", ".join(f"{rule} {run.preemptions} preemptions, {rate[rule]:.2f}x" for rule, run in runs.items())
    return Measured(rate["wait"], f"{shown} the throughput")


def multilevel_feedback(seed: int, share: float) -> Measured:
    """Steps of 8 rows, of the first 8 that came or of 32 that hold memory, answers as skewed as the source's."""
    random, now, requests = Random(seed), 0.0, list[Arrival]()
    while (now := now + random.expovariate(2.6)) < 400 * share:  # 1.1 times what 8 rows complete
        requests.append(Arrival(now, 200, _skewed(random, 2.0), len(requests), random.choice(TENANTS), max_tokens=4096))
    ours, theirs, wide = (
        _mean_duration(f"fcfs,batching={rule},{ENGINE}", requests)
        for rule in ("multilevel_feedback,max_num_seqs=32", "continuous,max_num_seqs=8", "continuous,max_num_seqs=32")
    )
    return Measured(
        theirs / ours,
        f"mean completion {theirs / ours:.2f}x sooner in 8 rows at 1.1 times capacity; {theirs / wide:.1f}x by 32 rows",
    )


def _skewed(random: Random, variation: float) -> int:
    """Returns the length of an answer, 200 tokens on average, with this coefficient of variation."""
    sigma = sqrt(log(1 + variation**2))
    return min(4000, max(1, round(exp(log(200) - sigma**2 / 2 + random.gauss(0.0, sigma)))))


def window(seed: int, share: float) -> Measured:
    """Scores: prompts of 30 to 300 tokens, one token of output, 20 a second."""
    random, now, requests = Random(seed), 0.0, list[Arrival]()
    while (now := now + random.expovariate(20.0)) < 60 * share:
        requests.append(Arrival(now, random.randrange(30, 300), 1, len(requests), random.choice(TENANTS), max_tokens=1))
    runs = {"no delay": _run(f"fcfs,{CHUNKED}", requests)}
    for delay in (0.005, 0.02):
        runs[f"{1000 * delay:g} ms"] = _run(f"fcfs,batching=window,max_batch_delay={delay},{CHUNKED}", requests)
    busy, base = {name: run.busy for name, run in runs.items()}, runs["no delay"].busy
    shown = ", ".join(
        f"{name} {1000 * (run.first_token.p95 or 0.0):.0f} ms p95, device {busy[name]:.0%} busy"
        for name, run in runs.items()
    )
    return Measured(base / busy["20 ms"], shown)


# order


def learned_rank(seed: int, share: float) -> Measured:
    requests = _arena(_arena_rate(), 300 * share, seed)
    ours, theirs = (_mean_duration(f"{order},{SLOTS}", requests) for order in ("learned_rank", "fcfs"))
    return Measured(theirs / ours, f"mean completion {theirs / ours:.2f}x sooner at 1.4 times capacity, nobody refused")


def learned_rank_offline(seed: int, share: float) -> Measured:
    """The first tenth of the answers is collected."""
    requests = _of_kinds(seed, 6000 * share)
    ours, theirs = (
        _seconds_until(f"{order},{SLOTS}", requests, len(requests) // 10) for order in ("learned_rank", "fcfs")
    )
    return Measured(theirs / ours, f"{theirs / ours:.1f}x as fast")


def service_gaps(seed: int, share: float) -> Measured:
    """Four tenants whose requests differ in size, always with work waiting."""
    random, requests = Random(seed), list[Arrival]()
    for tenant, (prompt, output) in zip(TENANTS, ((40, 20), (100, 50), (300, 100), (500, 300)), strict=True):
        for _ in range(round(60_000 * share) // (prompt + 2 * output)):
            requests.append(
                Arrival(
                    0.0,
                    round(prompt * random.uniform(0.5, 1.5)),
                    round(output * random.uniform(0.5, 1.5)),
                    tenant=tenant,
                )
            )
    random.shuffle(requests)
    settings = f"kv_tokens=10000,max_model_len=10000,{SMALL}"
    gaps = {
        order: _run(f"order={order},{settings}", _at_once(requests)).gap_seconds
        for order in ("fair", "vtc", "fcfs", "round_robin")
    }
    shown = ", ".join(f"{order} {gap:.2f} s" for order, gap in gaps.items())
    return Measured(gaps["round_robin"] / gaps["vtc"], f"largest gaps in engine time: {shown}")


def least_laxity(seed: int, share: float) -> Measured:
    random, seconds = Random(seed), (0.7, 2.0, 8.0)
    requests = [one._replace(deadline=random.choice(seconds)) for one in _poisson(seed, 1.4, 200 * share)]
    orders = ("least_laxity", "earliest_deadline", "fair", "fcfs")
    good = {order: simulate(f"order={order}", requests).good for order in orders}
    shown = ", ".join(f"{order} {share:.0%}" for order, share in good.items())
    return Measured(good["least_laxity"] / good["earliest_deadline"], f"good in time: {shown}")


def response_ratio(seed: int, share: float) -> Measured:
    requests = _arena(_arena_rate(), 300 * share, seed)
    orders = ("response_ratio", "learned_rank", "shortest_first", "fair", "fcfs")
    means = {order: _mean_duration(f"order={order},{SLOTS}", requests) for order in orders}
    shown = ", ".join(f"{order} {mean:.1f} s" for order, mean in means.items())
    return Measured(means["fcfs"] / means["response_ratio"], f"mean completion: {shown}")


def starvation_boost(seed: int, share: float) -> Measured:
    requests = _poisson(seed, 1.3, 150 * share)
    boosted, fair = (_run(f"order={order},{CHUNKED}", requests) for order in ("virtual_finish", "fair"))
    gain = boosted.gap_tokens / fair.gap_tokens
    return Measured(gain, f"its largest service gap is {gain:.1f}x that of deficit round robin")


# memory


def paging(seed: int, share: float) -> Measured:
    """Chats of short prompts that declare 2,048 tokens, as ShareGPT's are served."""
    requests = _of_kinds(seed, 2000 * share, 2048)
    ours, theirs = _rates((f"fcfs,{TIGHT}", f"fcfs,kv_allocation=contiguous,{TIGHT}"), requests)
    long = _conversations(seed, 500 * share)
    memory = f"kv_tokens=60000,max_model_len=16384,{CHUNKED}"
    more, less = _rates((f"fcfs,{memory}", f"fcfs,kv_allocation=contiguous,{memory}"), long)
    return Measured(
        ours / theirs,
        f"{ours / theirs:.1f}x for chats in 20,000 tokens of memory, {more / less:.2f}x for conversations in 60,000",
    )


def forecast_admission(seed: int, share: float) -> Measured:
    requests, memory = _conversations(seed, 500 * share), "kv_tokens=40000,max_model_len=16384"
    ours, theirs = (_run(f"fcfs,{more}{memory},{CHUNKED}", requests) for more in ("", "memory=optimistic,"))
    fewer, rate = ours.preemptions / max(1, theirs.preemptions), ours.output_rate / theirs.output_rate
    return Measured(
        fewer,
        f"{fewer:.2f}x the preemptions ({ours.preemptions} for {theirs.preemptions}) at {rate:.3f}x the throughput",
    )


# pools


def disaggregation(seed: int, share: float) -> Measured:
    """Four devices and a link of 100 Gb/s: the largest load with 90 % good by 2 s and 25 ms."""
    whole, chunked, apart = _largest_loads(Traffic.conversations(), Objective(2.0, 0.025), seed, share)
    gain = apart / max(0.1, whole)
    return Measured(
        gain,
        f"{gain:.1f}x the load of replicas that compute whole prompts first, {apart / max(0.1, chunked):.2f}x of "
        "replicas with chunks",
    )


def phase_splitting(seed: int, share: float) -> Measured:
    """The same for both kinds of its traffic, by the slowdowns that it allows 90 % of the requests: three times the
    prompt alone, 1.5 times a step of one decode; and by five times that step.
    """
    gains, told = dict[tuple[str, float], float](), list[str]()
    for traffic in (Traffic.conversations(), Traffic.code()):
        trace = [one._replace(deadline=3 * _alone(one.prompt_tokens)) for one in traffic.trace]
        step = DEVICE.seconds(StepWork(0, 1, round(mean(one.prompt_tokens for one in trace))))
        for slowdown in (1.5, 5.0):
            good = Objective(first_token=2.0, per_token=slowdown * step)  # the first by the request's own deadline
            _, chunked, apart = _largest_loads(replace(traffic, trace=trace), good, seed, share)
            gains[traffic.name, slowdown] = apart / max(0.1, chunked)
        tight, loose = (gains[traffic.name, slowdown] for slowdown in (1.5, 5.0))
        told.append(f"{traffic.name} {tight:.2f}x at 1.5 times a step, {loose:.2f}x at 5")
    return Measured(
        gains["conversations", 1.5], f"the load of replicas with chunks, by what a token may take: {'; '.join(told)}"
    )


def _alone(prompt_tokens: int) -> float:
    """Returns the seconds of a prompt on a device that does nothing else."""
    return DEVICE.seconds(StepWork(prompt_tokens, 0, 0))


def _largest_loads(traffic: Traffic, good: Objective, seed: int, share: float) -> tuple[float, float, float]:
    """Returns the largest load with 90 % good, between tenths by a straight line: of four devices that compute whole
    prompts first, of four with chunks, and of the best split.
    """
    most, together = dict[str, float](), Split(together=4)
    ways = {"whole prompts first": (PREFILL_FIRST, together), "chunked": (f"fcfs,{CHUNKED}", together)}
    ways |= {str(split): (f"fcfs,{CHUNKED}", split) for split in splits(4)[1:]}
    for name, (text, split) in ways.items():
        policy, most[name], before = parse_simulated_policy(text, DEVICE), 0.0, 1.0
        for load in (one / 10 for one in range(1, 12)):
            requests = _poisson(seed, 4 * load, 60 * share, traffic=traffic)
            now = simulate_split(split, policy, requests, DEVICE, Link(100e9 / 8), good).goodput
            if now < KNEE_GOODPUT:
                most[name] += 0.1 * (before - KNEE_GOODPUT) / (before - now)
                break
            most[name], before = load, now
    whole, chunked, *apart = most.values()
    return whole, chunked, max(apart)


def speculation(seed: int, share: float) -> Measured:
    """Up to 5 tokens of a small draft model: at a third of capacity, and bound by arithmetic, with few accepted."""
    light = _poisson(seed, 0.3, 120 * share)
    many = _at_once([Arrival(0.0, 100, 200, max_tokens=201) for _ in range(round(400 * share))])
    plain, smart = (
        _mean_duration(f"fcfs,{CHUNKED}{more}", light) for more in ("", ",speculate=smart:5,acceptance=0.7,draft=0.05")
    )
    none, fixed, fewer = _rates(
        [f"fcfs,{CHUNKED},speculate={tokens},acceptance=0.3,draft=0.05" for tokens in ("0", "5", "smart:5")],
        many,
    )
    return Measured(
        plain / smart,
        f"mean completion {plain / smart:.1f}x sooner at 0.3 times capacity; with 192 rows and 30 % accepted a fixed 5 "
        f"has {fixed / none:.2f}x the throughput of none, SmartSpec's rule {fewer / none:.2f}x",
    )


# overload


def deadline_admission(seed: int, share: float) -> Measured:
    requests = _poisson(seed, 1.4, 300 * share, deadline=2.0)
    ours, theirs = (
        _run(policy, requests).goodput
        for policy in (CHUNKED.replace("overload=unbounded", "order=fair"), f"fcfs,{CHUNKED}")
    )
    return Measured(ours, f"{ours:.0%} good in time, {theirs:.0%} unbounded and in order")


def controlled_delay(seed: int, share: float) -> Measured:
    requests = _poisson(seed, 1.4, 300 * share)
    good = _run(f"order=adaptive_lifo,{CHUNKED.replace('unbounded', 'controlled_delay')}", requests).goodput
    return Measured(good, f"{good:.0%} good in time")


# arithmetic


def decodes_of_prefill() -> float:
    """The time of a prompt of 4,096 tokens, in steps of one decode."""
    decode = DEVICE.seconds(StepWork(decode_tokens=1, decode_context=512))
    return sum(DEVICE.seconds(StepWork(512, 0, 0, at, 512 * at)) for at in range(0, 4096, 512)) / decode


MEGABYTES = 80 * 2 * 8 * 128 * 2 * 1024 / 1e6  # layers, keys and values, KV heads, their size, bytes, tokens


@cache
def _arena(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Returns Poisson arrivals of tenants of which the n-th sends 1/n as much as the first, as in a chat arena."""
    random, made, time = Random(seed), list[Arrival](), 0.0
    names = [f"client-{n}" for n in range(1, ARENA + 1)]
    shares = [1 / n for n in range(1, ARENA + 1)]
    typical = [exp(3.2 + 3.2 * kind / KINDS) for kind in range(KINDS)]
    while (time := time + random.expovariate(rate)) < seconds:
        kind, tenant = random.randrange(KINDS), random.choices(names, shares)[0]
        prompt = round(exp(random.uniform(2.1, 6.4)))
        output = min(MAX_TOKENS, max(1, round(typical[kind] * exp(random.gauss(0.0, NOISE)))))
        begins = (50 + kind, 150 + kind)
        made.append(Arrival(time, prompt, output, len(made), tenant, max_tokens=MAX_TOKENS, begins=begins))
    return made


def _arena_rate() -> float:
    """Returns 1.4 times the requests of `_arena` that the machine completes a second."""
    at_once = Workload(tuple(_arena(20.0, 100.0, 0)), max_tokens=MAX_TOKENS)
    return 1.4 * capacity(_policy(f"order=fair,{SLOTS}"), at_once, DEVICE)


def _finish(run: SimulatedRun) -> None:
    while not run.loop.is_over:
        run.loop.advance(run.loop.next_at + 10.0)


def _mean_duration(policy: str, arrivals: Sequence[Arrival]) -> float:
    run = SimulatedRun(_policy(policy), arrivals, DEVICE, Objective())
    _finish(run)
    return mean(run.recorder.durations)


def _seconds_until(policy: str, arrivals: Sequence[Arrival], count: int) -> float:
    """Return the time at which `count` requests are over."""
    run = SimulatedRun(_policy(policy), arrivals, DEVICE, Objective())
    if policy.startswith("learned_rank"):
        _teach(run)
    while run.num_over < count:
        run.loop.advance(run.loop.next_at)
    return run.loop.next_at
