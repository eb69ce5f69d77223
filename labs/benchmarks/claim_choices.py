"""Every choice beside the default, on four kinds of traffic: the second table of `docs/claims.md`.

Four tenants at 1.4 times capacity, of whom the first asks for three times as much as each of the others; a first token
is wanted within two seconds, then a token every 0.1 s on average. Every choice has our admission by deadline, which its
source has not: it makes most of them better. Each batching rule and each rule of memory has the default's order; memory
is scarce in the fourth kind alone, conversations in 24,000 tokens.
"""

from collections.abc import Iterator, Mapping
from random import Random

from admission.core import ORDERS, MemoryGate
from backend.config import Batching
from labs.benchmarks.claim_measures import Figures
from labs.benchmarks.overload_loads import DEVICE, ENGINE, FIRST_TOKEN, TENANTS, Traffic
from labs.benchmarks.report import Spread
from labs.simulation.arrival import Arrival
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import simulate_run

LOAD_SHARE_OF_CAPACITY = 1.4
RUN_SECONDS = 150.0
ASKING = (3, 1, 1, 1)  # by tenant
PER_TOKEN = 0.1
ORDER = "fair"
LONGEST = "max_model_len=16384"
WHOLE_PROMPTS = "prefill_chunk=off,max_num_batched_tokens=16384,max_num_seqs=192"
SCARCE = ",kv_tokens=24000"
TRAFFIC = {
    "conversations": Traffic.conversations,
    "code": Traffic.code,
    "short": Traffic.short,
    "scarce memory": Traffic.conversations,
}
KINDS = tuple(TRAFFIC)
HEADS = ("good", "light", "gap")


def choices() -> dict[str, str]:
    """Returns the settings of each choice, the default first."""
    found = {f"order {order}": f"{order},{ENGINE}" for order in ORDERS}
    for batching in Batching:
        if batching is not Batching.CONTINUOUS:
            engine = WHOLE_PROMPTS if batching is Batching.PREFILL_FIRST else ENGINE
            found[f"batching {batching}, order {ORDER}"] = f"{ORDER},batching={batching},{engine}"
    for memory in MemoryGate:
        if memory is not MemoryGate.FORECAST:
            free = ",min_free_blocks=200" if memory is MemoryGate.MINIMUM_FREE else ""
            found[f"memory {memory}, order {ORDER}"] = f"{ORDER},memory={memory}{free},{ENGINE}"
    return found


def measure(policy: str, seed: int, share: float) -> Figures:
    """Returns three figures of a choice on each kind of traffic: the share of all requests that are good; that of the
    worst of the three tenants who ask for no more than their share; and the largest difference of what two tenants were
    served while both had work waiting, in seconds of the device.
    """
    figures = Figures()
    for kind, traffic in TRAFFIC.items():
        settings = f"{policy},{LONGEST}{SCARCE if kind == KINDS[-1] else ''}"
        requests, good = _requests(traffic(), seed, RUN_SECONDS * share), Objective(FIRST_TOKEN, PER_TOKEN)
        run = simulate_run(parse_simulated_policy(settings, DEVICE), requests, DEVICE, good)
        light = min((tenant.goodput for tenant in run.tenants if tenant.name in TENANTS[1:]), default=0.0)
        found = {"% good": run.goodput, "% light": light, "s gap": run.gap_seconds}
        figures |= {f"{name}, {kind}": value for name, value in found.items()}
    return figures


def lines(found: Mapping[str, Mapping[str, Spread]]) -> Iterator[str]:
    """Yields the table, and its verdict on the default. What equals an earlier choice to the last digit has no row."""
    yield f"| choice | {' | '.join(f'{kind}: good | light | gap' for kind in KINDS)} |\n"
    yield f"|---|{'---|' * len(HEADS) * len(KINDS)}\n"
    rows, alike = dict[str, Mapping[str, Spread]](), dict[str, list[str]]()
    for choice, figures in found.items():
        same = next((other for other, own in rows.items() if own == figures), None)
        if same is not None:
            alike.setdefault(same, []).append(choice)
            continue
        rows[choice] = figures
        cells = (
            f"{one.median:.2f} s" if name.startswith("s ") else f"{one.median:.1%}" for name, one in figures.items()
        )
        yield f"| {choice} | {' | '.join(cells)} |\n"
    yield "\n"
    for choice, others in alike.items():
        yield f"- As {choice}, to the last digit: {', '.join(others)}.\n"
    for kind in KINDS:
        yield f"- {verdict(kind, {choice: _of(kind, figures) for choice, figures in rows.items()})}\n"


def verdict(kind: str, found: Mapping[str, tuple[float, float, float]]) -> str:
    """The choices that beat the default on one kind of traffic, of good requests, light tenants and gap."""
    (_, ours), *others = found.items()
    more = {choice for choice, one in others if one[0] > ours[0]}
    lighter = [choice for choice, one in others if one[1] > ours[1]]
    smaller = {choice for choice, one in others if one[2] < ours[2]}
    all_three = [choice for choice in lighter if choice in more & smaller]
    return (
        f"{kind}: of {len(others)} choices {len(more)} have more good requests than the default, {len(smaller)} a "
        f"smaller gap, {len(lighter)} serve light tenants better ({', '.join(lighter) or 'none'}), and "
        f"{len(all_three)} all three ({', '.join(all_three) or 'none'})."
    )


def _of(kind: str, figures: Mapping[str, Spread]) -> tuple[float, float, float]:
    good, light, gap = (figures[f"{name}, {kind}"].median for name in ("% good", "% light", "s gap"))
    return good, light, gap


def _requests(traffic: Traffic, seed: int, seconds: float) -> list[Arrival]:
    random, now, made = Random(seed), 0.0, list[Arrival]()
    while (now := now + random.expovariate(LOAD_SHARE_OF_CAPACITY * traffic.capacity)) < seconds:
        (tenant,), (drawn,) = random.choices(TENANTS, ASKING), random.choices(traffic.trace)
        one = drawn._replace(time=now, tenant=tenant, max_tokens=traffic.max_tokens, deadline=FIRST_TOKEN)
        made.append(one._replace(session=len(made)))
    return made
