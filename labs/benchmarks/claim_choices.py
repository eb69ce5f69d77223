"""Every choice beside the default, on three kinds of traffic at once: the second table of `docs/claims.md`.

Four tenants at 1.4 times capacity, of whom the first asks for three times as much as each of the others; a first token
is wanted within two seconds, then a token every 0.1 s on average. Every choice has our admission by deadline, which its
source has not: it makes most of them better. Three figures: the share of all requests that are good, that of the three
tenants who ask for no more than their share, and the gap, the largest difference of what two tenants were served, in
seconds of the device, while both had work waiting.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from admission.core import ORDERS, MemoryGate
from backend.config import Batching
from labs.benchmarks.overload_loads import DEVICE, ENGINE, FIRST_TOKEN, TENANTS, Traffic
from labs.simulation.arrival import Arrival
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import simulate_run

LOAD_SHARE_OF_CAPACITY = 1.4
RUN_SECONDS = 150.0
ASKING = (3, 1, 1, 1)  # by tenant
PER_TOKEN = 0.1
WHOLE_PROMPTS = "prefill_chunk=off,max_num_batched_tokens=16384,kv_tokens=430000,max_model_len=16384,max_num_seqs=192"
AS_PUBLISHED = {  # the settings that a choice needs; default: first come, first served
    Batching.PREFILL_FIRST: f"fcfs,batching=prefill_first,{WHOLE_PROMPTS}",
    Batching.STATIC_PADDED: f"magnus,batching=static_padded,{ENGINE}",
    Batching.SLAI: f"shortest_first,batching=slai,{ENGINE}",
    Batching.WAIT: f"fcfs,batching=wait,memory=optimistic,{ENGINE}",
    Batching.NESTED_WAIT: f"fcfs,batching=nested_wait,memory=optimistic,{ENGINE}",
}
TRAFFIC = {"conversations": Traffic.conversations, "code": Traffic.code, "short": Traffic.short}


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a choice on one kind of traffic."""

    good: float  # share of the requests
    light: float  # the least share of good requests of a tenant within its share
    gap: float  # seconds


def choices() -> Iterator[tuple[str, str]]:
    """Yields each choice with its policy, the default first."""
    for order in ORDERS:
        yield f"order {order}", f"{order},{ENGINE}"
    for batching in Batching:
        if batching is not Batching.CONTINUOUS:
            yield f"batching {batching}", AS_PUBLISHED.get(batching, f"fcfs,batching={batching},{ENGINE}")
    for memory in MemoryGate:
        if memory is not MemoryGate.FORECAST:
            free = ",min_free_blocks=200" if memory is MemoryGate.MINIMUM_FREE else ""
            yield f"memory {memory}", f"fcfs,memory={memory}{free},{ENGINE}"


def beside(seed: int, share: float) -> dict[str, dict[str, Figures]]:
    """Returns the figures of each choice, by kind of traffic."""
    loads = {name: _requests(traffic(), seed, RUN_SECONDS * share) for name, traffic in TRAFFIC.items()}
    return {
        choice: {name: _figures(policy, requests) for name, requests in loads.items()} for choice, policy in choices()
    }


def lines(found: dict[str, dict[str, Figures]]) -> Iterator[str]:
    """Yields the table, and its verdict on the default."""
    kinds = list(TRAFFIC)
    yield f"| choice | {' | '.join(f'{kind}: good | light | gap' for kind in kinds)} |\n"
    yield f"|---|{'---|' * 3 * len(kinds)}\n"
    for choice, figures in found.items():
        each = (figures[kind] for kind in kinds)
        cells = (f"{one.good:.1%} | {one.light:.1%} | {one.gap:.2f} s" for one in each)
        yield f"| {choice} | {' | '.join(cells)} |\n"
    yield "\n"
    for kind in kinds:
        yield f"- {verdict(kind, {choice: figures[kind] for choice, figures in found.items()})}\n"


def verdict(kind: str, found: dict[str, Figures]) -> str:
    """The choices that beat the default on one kind of traffic, and their losses."""
    (_, ours), *others = found.items()
    more = [choice for choice, one in others if one.good > ours.good]
    smaller = [choice for choice, one in others if one.gap < ours.gap]
    lighter = [choice for choice, one in others if one.light > ours.light]
    all_three = [choice for choice, one in others if one.good > ours.good and one.gap < ours.gap and choice in lighter]
    return (
        f"{kind}: of {len(others)} choices {len(more)} have more good requests than the default, {len(smaller)} a "
        f"smaller gap, {len(lighter)} serve light tenants better ({', '.join(lighter) or 'none'}), and "
        f"{len(all_three)} all three ({', '.join(all_three) or 'none'})."
    )


def _requests(traffic: Traffic, seed: int, seconds: float) -> list[Arrival]:
    random, now, made = Random(seed), 0.0, list[Arrival]()
    while (now := now + random.expovariate(LOAD_SHARE_OF_CAPACITY * traffic.capacity)) < seconds:
        (tenant,), (drawn,) = random.choices(TENANTS, ASKING), random.choices(traffic.trace)
        one = drawn._replace(time=now, tenant=tenant, max_tokens=traffic.max_tokens, deadline=FIRST_TOKEN)
        made.append(one._replace(session=len(made)))
    return made


def _figures(policy: str, requests: list[Arrival]) -> Figures:
    run = simulate_run(parse_simulated_policy(policy, DEVICE), requests, DEVICE, Objective(FIRST_TOKEN, PER_TOKEN))
    light = min(tenant.goodput for tenant in run.tenants if tenant.name in TENANTS[1:])
    return Figures(run.goodput, light, run.gap_seconds)
