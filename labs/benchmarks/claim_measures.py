"""The measurements of `claims`: each function is the setting of a claim, as near to its source's as possible.

It returns its figures by name. The first word of a name is the unit, `x` for a ratio, `%` for a share, `+%` for a
change, and the rest is read behind the figure. Batches and memory are measured with the default's order, `fair`; other
orders are named by their settings.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from math import exp, log, sqrt
from random import Random
from statistics import mean

from admission.step_times.step_time import StepWork
from labs.benchmarks.kv_use import WINDOW_SECONDS, Weighed, WeighingLoop
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, Traffic, drawn_trace
from labs.benchmarks.overload_runs import simulate
from labs.orderings.ordering import PublishedOrder
from labs.simulation.arrival import NO_TARGET, Arrival, sequence_of
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.pools.link import Link
from labs.simulation.pools.pools import Split, simulate_split, splits
from labs.simulation.recorder import Objective, Recorder
from labs.simulation.search.sweep import KNEE_GOODPUT
from labs.simulation.study import SimulatedRun, capacity, simulate_run
from labs.simulation.summary import Summary
from labs.simulation.workload import Workload

Figures = dict[str, float]

ENGINE = "max_num_batched_tokens=512,prefill_chunk=512,overload=unbounded,prefix_cache=off"
CHUNKED = f"{ENGINE},max_num_seqs=192"
SMALL = f"{ENGINE},max_num_seqs=32"
STATIC, PADDED = "fair,batching=static,", "fair,batching=static_padded,"
SLOTS = f"{ENGINE},max_num_seqs=64"
TIGHT = f"kv_tokens=20000,max_model_len=16384,{CHUNKED}"
TENANTS = ("tenant-1", "tenant-2", "tenant-3", "tenant-4")
TENTHS = [one / 10 for one in range(1, 12)]  # of the capacity
ARENA, KINDS, NOISE = 27, 40, 0.62  # tenants, kinds of prompts, and the deviation of an answer's logarithm
SCARCE_KV_TOKENS = 60_000
SCARCE = (
    "order=fair,overload=unbounded,max_num_batched_tokens=512,max_num_seqs=256,prefill_chunk=512,"
    f"kv_tokens={SCARCE_KV_TOKENS},block_size=16"
)
BLOCK_BYTES, COPY_BYTES_PER_SECOND = 16 * 131_072, 25e9
SCARCE_HOST = f"num_host_blocks={SCARCE_KV_TOKENS // 2 // 16},block_copy_seconds={BLOCK_BYTES / COPY_BYTES_PER_SECOND}"


# requests


def _at_once(requests: Sequence[Arrival]) -> list[Arrival]:
    return [
        one._replace(time=0.0, session=n, tenant=one.tenant or TENANTS[n % 4], max_tokens=one.max_tokens or MAX_TOKENS)
        for n, one in enumerate(requests)
    ]


def _conversations(seed: int, count: float) -> list[Arrival]:
    return _at_once(Random(seed).sample(drawn_trace(), round(count)))


def _poisson(
    seed: int,
    load: float,
    seconds: float,
    deadline: Callable[[Arrival], float | None] = lambda one: None,
    traffic: Traffic | None = None,
) -> list[Arrival]:
    """Conversations, or other traffic, at a multiple of what the machine completes."""
    traffic = traffic or Traffic.conversations()
    random, made, now = Random(seed), list[Arrival](), 0.0
    while (now := now + random.expovariate(load * traffic.capacity)) < seconds:
        tenant = random.choice(TENANTS)
        one = random.choice(traffic.trace)._replace(time=now, tenant=tenant, max_tokens=MAX_TOKENS)
        made.append(one._replace(session=len(made), deadline=deadline(one)))
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
        order.predicted.learn(made.tenant, made.request.prompt, made.request.max_tokens, one.output_tokens)


def _policy(text: str) -> SimulatedPolicy:
    return parse_simulated_policy(text, DEVICE)


def _run(policy: str, arrivals: Sequence[Arrival]) -> Summary:
    return simulate_run(_policy(policy), arrivals, DEVICE, Objective(first_token=2.0, per_token=0.1))


def _rates(policies: Iterable[str], arrivals: Sequence[Arrival]) -> list[float]:
    """Returns the output tokens a second of each policy."""
    return [_run(policy, arrivals).output_rate for policy in policies]


# batches


def static_to_continuous(seed: int, share: float) -> Figures:
    policies = (f"fair,{SMALL}", f"{PADDED}{SMALL}", f"{STATIC}{SMALL}")
    ours, padded, packed = _rates(policies, _conversations(seed, 600 * share))
    return {"x the throughput of padded batches of 32": ours / padded, "x of packed ones": ours / packed}


def continuous_tail(seed: int, share: float) -> Figures:
    """At 0.9 times what continuous batching completes of the same rows, which is more than static batches do."""
    requests = _at_once(_conversations(seed, 400 * share))
    rate = len(requests) / _run(f"fair,{SMALL}", requests).seconds
    random, now, spread = Random(seed), 0.0, list[Arrival]()
    for one in requests:
        spread.append(one._replace(time=(now := now + random.expovariate(0.9 * rate))))
    ours, padded, packed = (_run(f"{batching}{SMALL}", spread) for batching in ("fair,", PADDED, STATIC))
    return {
        "+% throughput beside padded batches": ours.output_rate / padded.output_rate - 1,
        "+% p99 of a request's time per token": _p99(ours.per_token.p99) / _p99(padded.per_token.p99) - 1,
        "+% that p99 beside packed ones": _p99(ours.per_token.p99) / _p99(packed.per_token.p99) - 1,
        "+% p99 to the last token": _p99(ours.duration.p99) / _p99(padded.duration.p99) - 1,
        "+% throughput beside packed ones": ours.output_rate / packed.output_rate - 1,
    }


def length_variance(seed: int, share: float) -> Figures:
    """Answers of 200 tokens on average to prompts of 200, with ever more variance."""
    gains = {}
    for variation in (2.0, 1.0, 0.5, 0.0):
        random = Random(seed)
        lengths = [_skewed(random, variation) for _ in range(round(600 * share))]
        requests = _at_once([Arrival(0.0, 200, length, max_tokens=4096) for length in lengths])
        ours, theirs = _rates((f"fair,{SMALL}", f"{PADDED}{SMALL}"), requests)
        gains[f"x at a coefficient of variation of {variation:g}"] = ours / theirs
    return gains


def padding_waste(seed: int, share: float) -> Figures:
    requests = _conversations(seed, 600 * share)
    return {
        "% of computed tokens": _run(f"{PADDED}{SMALL}", requests).padding,
        "% with prompts of like lengths together": _run(
            f"length_groups,batching=static_padded,{SMALL}", requests
        ).padding,
    }


def filled_rows(seed: int, share: float) -> Figures:
    """The rows of 32 that bring a token in the average step, of requests that all wait from the start."""
    requests = _conversations(seed, 600 * share)
    return {
        f"% of rows filled by {name}": run.output_rate * run.seconds / run.steps / 32
        for name, policy in (("static batches", f"{STATIC}{SMALL}"), ("continuous ones", f"fair,{SMALL}"))
        for run in (_run(policy, requests),)
    }


PREFILL_FIRST = (
    "fair,batching=prefill_first,overload=unbounded,prefill_chunk=off,max_num_batched_tokens=16384,max_num_seqs=192,"
    "kv_tokens=430000,max_model_len=16384,prefix_cache=off"
)


def chunked_prefill(seed: int, share: float) -> Figures:
    """Capacity as the source has it: the largest load with 99 % of tokens within 0.1 s, in steps of a tenth."""
    requests = _poisson(seed, 0.9, 200 * share)
    whole, chunked = _run(PREFILL_FIRST, requests), _run(f"fair,{CHUNKED}", requests)
    most = {}
    for policy in (PREFILL_FIRST, f"fair,{CHUNKED}"):
        runs = partial(_at_load, policy, seed, 100 * share)
        most[policy] = _largest(lambda load: (runs(load).interval.p99 or 0.0) <= 0.1, TENTHS)  # noqa: B023
    return {
        "x the capacity of whole prompts, with 99 % of tokens within 0.1 s": most[f"fair,{CHUNKED}"]
        / max(0.1, most[PREFILL_FIRST]),
        "+% throughput at 0.9 times capacity": chunked.output_rate / whole.output_rate - 1,
        "x its p99 between tokens there": _p99(chunked.interval.p99) / _p99(whole.interval.p99),
    }


def _at_load(policy: str, seed: int, seconds: float, load: float) -> Summary:
    return _run(policy, _poisson(seed, load, seconds))


def _largest(holds: Callable[[float], bool], loads: Sequence[float]) -> float:
    """Returns the largest load that holds, looked for by halves; 0 if none does."""
    number = bisect_left(loads, True, key=lambda load: not holds(load))
    return loads[number - 1] if number else 0.0


def _p99(seconds: float | None) -> float:
    return seconds or 1e-9


def slai(seed: int, share: float) -> Figures:
    """Half of the requests want tokens 0.1 s apart, half 0.5 s."""
    random = Random(seed)
    requests = [one._replace(interval=random.choice((0.1, 0.5))) for one in _poisson(seed, 0.95, 200 * share)]
    ours, theirs = (
        _run(policy, requests).first_token
        for policy in (f"order=shortest_first,batching=slai,{CHUNKED}", f"fcfs,{CHUNKED}")
    )
    return {
        "+% median time to the first token": _p99(ours.p50) / _p99(theirs.p50) - 1,
        "+% p99": _p99(ours.p99) / _p99(theirs.p99) - 1,
    }


def slai_capacity(seed: int, share: float) -> Figures:
    """The largest load, in steps of 5 %, with a median of first tokens below 0.5 s."""
    most = {}
    for policy in (f"order=shortest_first,batching=slai,{CHUNKED}", f"fcfs,{CHUNKED}"):
        runs = partial(_at_load, policy, seed, 150 * share)
        loads = [one / 20 for one in range(16, 27)]
        most[policy] = _largest(lambda load: (runs(load).first_token.p50 or 0.0) < 0.5, loads)  # noqa: B023
    ours, theirs = most.values()
    return {"+% load": ours / max(theirs, 0.1) - 1, "x its capacity": ours, "x that of fcfs": theirs}


def magnus(seed: int, share: float) -> Figures:
    """All at once: padded batches of 7, as many as the paper's engine has memory for the longest, and Magnus's own."""
    requests, memory = _of_kinds(seed, 1500 * share), "batching=static_padded,kv_tokens=40000,max_model_len=8192"
    few, own = f"{memory},{ENGINE},max_num_seqs=7", f"{memory},{ENGINE},max_num_seqs=64"
    taught = SimulatedRun(_policy(f"magnus,{own}"), requests, DEVICE, Objective())
    _teach(taught)
    _finish(taught)
    ours, theirs = taught.summary().output_rate, _run(f"fcfs,{few}", requests).output_rate
    continuous = _run(f"fair,kv_tokens=40000,max_model_len=8192,{SLOTS}", requests).output_rate
    return {
        "+% throughput beside padded batches of 7": ours / theirs - 1,
        "x of Magnus's has continuous batching": continuous / ours,
    }


def wait(seed: int, share: float) -> Figures:
    """A quarter of the memory that conversations at this load would hold."""
    requests, memory = _poisson(seed, 1.1, 150 * share), "memory=optimistic,kv_tokens=60000,max_model_len=16384"
    rules = ("wait", "nested_wait", "continuous")
    runs = {rule: _run(f"fair,batching={rule},{memory},{CHUNKED}", requests) for rule in rules}
    continuous = runs.pop("continuous")
    gains = {f"+% throughput, {rule}": run.output_rate / continuous.output_rate - 1 for rule, run in runs.items()}
    return gains | {
        f"x the preemptions, {rule}": run.preemptions / max(1, continuous.preemptions) for rule, run in runs.items()
    }


def multilevel_feedback(seed: int, share: float) -> Figures:
    """Steps of 8 rows, of the first 8 that came or of 32 that hold memory, answers as skewed as the source's."""
    random, now, requests = Random(seed), 0.0, list[Arrival]()
    while (now := now + random.expovariate(2.6)) < 400 * share:  # 1.1 times what 8 rows complete
        requests.append(Arrival(now, 200, _skewed(random, 2.0), len(requests), random.choice(TENANTS), max_tokens=4096))
    ours, theirs, wide = (
        _mean_duration(f"fair,batching={rule},{ENGINE}", requests)
        for rule in ("multilevel_feedback,max_num_seqs=32", "continuous,max_num_seqs=8", "continuous,max_num_seqs=32")
    )
    return {
        "x sooner complete on average, in 8 rows at 1.1 times capacity": theirs / ours,
        "x by 32 rows instead": theirs / wide,
    }


def _skewed(random: Random, variation: float) -> int:
    """Returns the length of an answer, 200 tokens on average, with this coefficient of variation."""
    sigma = sqrt(log(1 + variation**2))
    return min(4000, max(1, round(exp(log(200) - sigma**2 / 2 + random.gauss(0.0, sigma)))))


def window(seed: int, share: float) -> Figures:
    """Scores: prompts of 30 to 300 tokens, one token of output, 20 a second."""
    random, now, requests = Random(seed), 0.0, list[Arrival]()
    while (now := now + random.expovariate(20.0)) < 60 * share:
        requests.append(Arrival(now, random.randrange(30, 300), 1, len(requests), random.choice(TENANTS), max_tokens=1))
    none, *delayed = (
        _run(f"fair,{batching}{CHUNKED}", requests)
        for batching in ("", *(f"batching=window,max_batch_delay={delay}," for delay in (0.02, 0.005)))
    )
    figures = {}
    for run, name in zip(delayed, ("20 ms", "5 ms"), strict=True):
        figures[f"% of the device's time spared by {name}"] = 1 - run.busy * run.seconds / (none.busy * none.seconds)
        figures[f"ms later is p95, by {name}"] = 1e3 * (_p99(run.first_token.p95) - _p99(none.first_token.p95))
    return figures


# order


def learned_rank(seed: int, share: float) -> Figures:
    """At 1.4 times capacity, nobody refused, 27 tenants."""
    requests = _arena(_arena_rate(), 300 * share, seed)
    ours, theirs = (_finished(f"{order},{SLOTS}", requests) for order in ("learned_rank", "fcfs"))
    return {
        "+% throughput": ours.summary().output_rate / theirs.summary().output_rate - 1,
        "x sooner complete on average": mean(theirs.recorder.durations) / mean(ours.recorder.durations),
    }


def learned_rank_offline(seed: int, share: float) -> Figures:
    """The first tenth of the answers is collected."""
    requests = _of_kinds(seed, 6000 * share)
    ours, theirs = (
        _seconds_until(f"{order},{SLOTS}", requests, len(requests) // 10) for order in ("learned_rank", "fcfs")
    )
    return {"x as fast": theirs / ours}


def synthetic_pairs(seed: int, share: float) -> Figures:
    """Prompts and answers as conversations have them, all there from the start."""
    number = round(10_000 * share)
    run = _run(f"fair,{CHUNKED}", _conversations(seed, number))
    return {"h for 10,000 pairs": run.seconds / 3600 * 10_000 / number}


def service_gaps(seed: int, share: float) -> Figures:
    """Four tenants whose requests differ in size, always with work waiting, in 10,000 tokens of memory."""
    random, requests = Random(seed), list[Arrival]()
    for tenant, (prompt, output) in zip(TENANTS, ((40, 20), (100, 50), (300, 100), (500, 300)), strict=True):
        for _ in range(round(60_000 * share) // (prompt + 2 * output)):
            drawn, answer = (round(tokens * random.uniform(0.5, 1.5)) for tokens in (prompt, output))
            requests.append(Arrival(0.0, drawn, answer, tenant=tenant))
    random.shuffle(requests)
    settings = f"kv_tokens=10000,max_model_len=10000,{SMALL}"
    gaps = {
        order: _run(f"order={order},{settings}", _at_once(requests)).gap_tokens
        for order in ("vtc", "round_robin", "fcfs", "fair")
    }
    vtc = gaps.pop("vtc")
    return {"x its bound of 40,000 weighted tokens": vtc / 40_000} | {
        f"x that gap in order {order}": gap / vtc for order, gap in gaps.items()
    }


def least_laxity(seed: int, share: float) -> Figures:
    random, seconds = Random(seed), (0.7, 2.0, 8.0)
    requests = [one._replace(deadline=random.choice(seconds)) for one in _poisson(seed, 1.4, 200 * share)]
    orders = ("least_laxity", "earliest_deadline", "fair", "fcfs")
    late = {order: 1 - simulate(f"order={order}", requests).good for order in orders}
    ours = late.pop("least_laxity")
    return {f"x as many late or refused as {order}": ours / max(other, 1e-9) for order, other in late.items()}


def response_ratio(seed: int, share: float) -> Figures:
    requests = _arena(_arena_rate(), 300 * share, seed)
    orders = ("response_ratio", "fcfs", "learned_rank", "shortest_first", "fair")
    found = {order: _durations(f"order={order},{SLOTS}", requests) for order in orders}
    ours = found.pop("response_ratio")
    means = {f"x the mean completion of {order}": mean(ours) / mean(other) for order, other in found.items()}
    return {**means, "x the longest of fcfs": max(ours) / max(found["fcfs"])}


def starvation_boost(seed: int, share: float) -> Figures:
    requests = _poisson(seed, 1.3, 150 * share)
    boosted, fair = (_run(f"order={order},{CHUNKED}", requests) for order in ("virtual_finish", "fair"))
    return {"x the largest service gap of deficit round robin": boosted.gap_tokens / max(1.0, fair.gap_tokens)}


# memory


def paging(seed: int, share: float) -> Figures:
    """Chats of short prompts that declare 2,048 tokens, as ShareGPT's are served."""
    requests = _of_kinds(seed, 2000 * share, 2048)
    ours, theirs = _rates((f"fair,{TIGHT}", f"fair,kv_allocation=contiguous,{TIGHT}"), requests)
    long = _conversations(seed, 500 * share)
    memory = f"kv_tokens={SCARCE_KV_TOKENS},max_model_len=16384,{CHUNKED}"
    more, less = _rates((f"fair,{memory}", f"fair,kv_allocation=contiguous,{memory}"), long)
    return {
        "x the throughput of contiguous memory, chats in 20,000 tokens of it": ours / theirs,
        "x for conversations in 60,000": more / less,
    }


def kv_use(seed: int, share: float) -> Figures:
    """Conversations that declare 1,024 tokens, all waiting from the start for 60,000 tokens of memory."""
    requests = _conversations(seed, 600 * share)
    wasted, used = {}, {}
    longest = max(one.prompt_tokens + max(one.output_tokens, MAX_TOKENS) for one in requests)
    for name, allocation in (("contiguous", "kv_allocation=contiguous"), ("in blocks", SCARCE_HOST)):
        policy = _policy(f"{SCARCE},max_model_len={longest},{allocation}")
        recorder = Recorder(DEVICE, Objective(), policy.weights)
        loop = WeighingLoop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len)
        loop.weighed = weighed = Weighed()
        end = loop.run(requests)
        windows = range(max(1, len(weighed.held) // 2))  # the last requests leave memory empty
        full = sum(weighed.held[n] - weighed.unused[n] for n in windows)
        seconds = min(end, len(windows) * WINDOW_SECONDS)
        wasted[name], used[name] = weighed.waste, full / seconds / SCARCE_KV_TOKENS
    return {
        **{f"% of held memory unused, {name}": share for name, share in wasted.items()},
        "+% unused memory by blocks": wasted["in blocks"] / wasted["contiguous"] - 1,
        **{f"% of all memory used, {name}": share for name, share in used.items()},
    }


def forecast_admission(seed: int, share: float) -> Figures:
    requests, memory = _conversations(seed, 500 * share), "kv_tokens=40000,max_model_len=16384"
    ours, theirs = (_run(f"fair,{more}{memory},{CHUNKED}", requests) for more in ("", "memory=optimistic,"))
    return {
        "x the preemptions of optimistic admission": ours.preemptions / max(1, theirs.preemptions),
        "x its throughput": ours.output_rate / theirs.output_rate,
    }


# pools


def disaggregation(seed: int, share: float) -> Figures:
    """Four devices and a link of 100 Gb/s: the largest load with 90 % good by 2 s and 25 ms."""
    whole, chunked, apart = _largest_loads(Traffic.conversations(), Objective(2.0, 0.025), seed, share)
    return {
        "x the load of replicas that compute whole prompts first": apart / max(0.1, whole),
        "x of replicas with chunks": apart / max(0.1, chunked),
    }


def phase_splitting(seed: int, share: float) -> Figures:
    """The same for both kinds of its traffic, by the slowdowns that it allows 90 % of the requests: three times the
    prompt alone, 1.5 times a step of one decode; and by five times that step.
    """
    gains = Figures()
    for traffic in (Traffic.conversations(), Traffic.code()):
        step = DEVICE.seconds(StepWork(0, 1, round(mean(one.prompt_tokens for one in traffic.trace))))
        for slowdown in (1.5, 5.0):
            good = Objective(first_token=2.0, per_token=slowdown * step)  # the first by the request's own deadline
            _, chunked, apart = _largest_loads(traffic, good, seed, share, _alone_three_times)
            gains[f"x for {traffic.name} at {slowdown:g} times a step"] = apart / max(0.1, chunked)
    return gains


def _alone_three_times(one: Arrival) -> float:
    """Returns three times the seconds of its prompt on a device that does nothing else."""
    return 3 * DEVICE.seconds(StepWork(one.prompt_tokens, 0, 0))


def _largest_loads(
    traffic: Traffic,
    good: Objective,
    seed: int,
    share: float,
    deadline: Callable[[Arrival], float | None] = lambda one: None,
) -> tuple[float, float, float]:
    """Returns the largest load with 90 % good, between tenths by a straight line: of four devices that compute whole
    prompts first, of four with chunks, and of the best split.
    """
    most, together = dict[str, float](), Split(together=4)
    ways = {"whole prompts first": (PREFILL_FIRST, together), "chunked": (f"fair,{CHUNKED}", together)}
    ways |= {str(split): (f"fair,{CHUNKED}", split) for split in splits(4)[1:]}
    for name, (text, split) in ways.items():
        policy, shares = _policy(text), {0.0: 1.0}

        def is_good(load: float) -> bool:
            requests = _poisson(seed, 4 * load, 60 * share, deadline, traffic)
            shares[load] = simulate_split(split, policy, requests, DEVICE, Link(100e9 / 8), good).goodput  # noqa: B023
            return shares[load] >= KNEE_GOODPUT  # noqa: B023

        most[name] = low = _largest(is_good, TENTHS)
        if (high := round(low + 0.1, 1)) in shares:
            most[name] += 0.1 * (shares[low] - KNEE_GOODPUT) / (shares[low] - shares[high])
    whole, chunked, *apart = most.values()
    return whole, chunked, max(apart)


# speculation


def speculation(seed: int, share: float) -> Figures:
    """Up to 5 tokens of a small draft model: at a third of capacity, and bound by arithmetic, with few accepted."""
    light = _poisson(seed, 0.3, 120 * share)
    many = _at_once([Arrival(0.0, 100, 200, max_tokens=201) for _ in range(round(400 * share))])
    plain, smart = (
        _mean_duration(f"fair,{CHUNKED}{more}", light) for more in ("", ",speculate=smart:5,acceptance=0.7,draft=0.05")
    )
    none, fixed, fewer = _rates(
        [f"fair,{CHUNKED},speculate={tokens},acceptance=0.3,draft=0.05" for tokens in ("0", "5", "smart:5")],
        many,
    )
    return {
        "x sooner complete on average, at 0.3 times capacity, 70 % accepted": plain / smart,
        "x the throughput of none in 192 rows, 30 % accepted": fewer / none,
        "x by a fixed 5": fixed / none,
    }


def speculation_by_batch(seed: int, share: float) -> Figures:
    """A fixed 5 tokens of a small draft model, 70 % accepted, answers of 100 to 300 tokens to prompts of 100."""
    gains, random = {}, Random(seed)
    for rows in (1, 16, 32, 64):
        lengths = [random.randrange(100, 300) for _ in range(max(rows, round(4 * rows * share)))]
        requests = _at_once([Arrival(0.0, 100, length, max_tokens=512) for length in lengths])
        policy = f"fair,{ENGINE},max_num_seqs={rows},acceptance=0.7,draft=0.05,speculate="
        none, fixed = _rates((f"{policy}0", f"{policy}5"), requests)
        gains[f"x the tokens of none in {rows} {'rows' if rows > 1 else 'row'}"] = fixed / none
    return gains


# overload


def deadline_admission(seed: int, share: float) -> Figures:
    """At 1.4 times capacity; beside it CoDel with adaptive LIFO, and no bound at all."""
    dated, undated = (_poisson(seed, 1.4, 300 * share, lambda _: wait) for wait in (2.0, None))  # noqa: B023
    lifo = f"order=adaptive_lifo,{CHUNKED.replace('unbounded', 'controlled_delay')}"
    ours = _run(CHUNKED.replace("overload=unbounded", "order=fair"), dated).goodput
    unbounded, codel = _run(f"fcfs,{CHUNKED}", dated).goodput, _run(lifo, undated).goodput
    return {
        "% good in time": ours,
        "% unbounded and in order": unbounded,
        "% by CoDel with adaptive LIFO": codel,
        "x the good requests of admission by deadline": codel / max(ours, 1e-9),
    }


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


@cache
def _arena_rate() -> float:
    """Returns 1.4 times the requests of `_arena` that the machine completes a second."""
    at_once = Workload(tuple(_arena(20.0, 100.0, 0)), max_tokens=MAX_TOKENS)
    return 1.4 * capacity(_policy(f"order=fair,{SLOTS}"), at_once, DEVICE)


def _finish(run: SimulatedRun) -> None:
    while not run.loop.is_over:
        run.loop.advance(run.loop.next_at + 10.0)


def _finished(policy: str, arrivals: Sequence[Arrival]) -> SimulatedRun:
    run = SimulatedRun(_policy(policy), arrivals, DEVICE, Objective())
    _finish(run)
    return run


def _durations(policy: str, arrivals: Sequence[Arrival]) -> list[float]:
    return list(_finished(policy, arrivals).recorder.durations)


def _mean_duration(policy: str, arrivals: Sequence[Arrival]) -> float:
    return mean(_durations(policy, arrivals))


def _seconds_until(policy: str, arrivals: Sequence[Arrival], count: int) -> float:
    """Return the time at which `count` requests are over."""
    run = SimulatedRun(_policy(policy), arrivals, DEVICE, Objective())
    if policy.startswith("learned_rank"):
        _teach(run)
    while run.num_over < count:
        run.loop.advance(run.loop.next_at)
    return run.loop.next_at
