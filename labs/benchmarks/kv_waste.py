"""The KV memory that is allocated and not used, by tenant: `python -m labs.benchmarks.kv_waste [--trace FILE ...]`.

Llama-3-8B on an A100 (simulated, published step times; 128 KiB of keys and values a token), 512 tokens a step, 256
sequences, a host pool of half of the device's memory. Each workload is served in blocks of 16 tokens and of 32, and
beside them in one contiguous run for each request, as memory was allocated before paging: for its declared length,
1,024 tokens of answer, and for its exact length, which no server could know.

Figures are byte-seconds over the run, by tenant and exact at every event: held memory, by the charged tenant; its part
with room for tokens that no step has computed or is computing; idle cached blocks, by their last user; and the host's
blocks. Waste is the second figure over the first: over the run, of the worst tenant, in the worst minute. Tokens that
the steps in flight are writing are shown beside it, and are not part of it; so are tokens that they may still write for
ended sequences.

Azure's traces (CSV) and lengths drawn as in `overload`, which stand for them without `--trace`, tell no shared
prefixes, so none of their blocks is ever idle or swapped. Mooncake's (JSON lines, slowed down to the load that this
machine serves) and conversations made as in `prefix_cache` do. Of eight tenants the first has half of the sessions, the
second a quarter, and so on.
"""

import gc
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.sequence import Sequence, SequenceStatus
from labs.benchmarks.overload_loads import drawn_trace
from labs.benchmarks.prefix_cache import conversations
from labs.benchmarks.prefix_tenants import with_tenants
from labs.benchmarks.report import Report, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder
from labs.simulation.traces import read_trace

DEVICE = DEVICES["llama3-8b-a100"]
TOKEN_BYTES = 131_072
GIB = 1 << 30
CORE = "order=fair,overload=unbounded"
ENGINE = "max_num_batched_tokens=512,max_num_seqs=256,prefill_chunk=512"
BANDWIDTH = 25e9  # bytes a second of a copy to the host or back
MAX_TOKENS = 1024  # declared by every request
SHARES = [0.5**n for n in range(8)]  # of tenants, in the sessions
SEED = 7
MOST_WASTE = 0.01
WINDOW_SECONDS = 60.0
AZURE_SLOWDOWN_RATIO = 1.5  # of the trace: one machine serves it, with backlogs only in bursts
MOONCAKE_SLOWER, MOONCAKE_REQUESTS = 12.0, 4_000
DRAWN, DRAWN_RATE, SESSIONS = 5_000, 3.5, 600


@dataclass(frozen=True, slots=True)
class Allocation:
    """One way to allocate memory."""

    name: str
    block_size: int = 16
    is_contiguous: bool = False
    max_tokens: int = MAX_TOKENS  # that each request declares; 0: what it will have
    kv_tokens: int = DEVICE.kv_tokens

    @property
    def settings(self) -> str:
        size, tokens = self.block_size, self.kv_tokens
        if self.is_contiguous:
            return f"kv_tokens={tokens},block_size={size},kv_allocation=contiguous"
        copy = size * TOKEN_BYTES / BANDWIDTH
        host = f"num_host_blocks={tokens // 2 // size},block_copy_seconds={copy}"
        return f"kv_tokens={tokens},block_size={size},{host}"


BLOCKS_OF_16 = Allocation("blocks of 16")
ALLOCATIONS = (
    BLOCKS_OF_16,
    Allocation("blocks of 32", block_size=32),
    Allocation("contiguous", is_contiguous=True),
    Allocation("contiguous, lengths known", is_contiguous=True, max_tokens=0),
)
Slots = Mapping[str, float]  # of tokens, by tenant


@dataclass(frozen=True, slots=True)
class Use:
    """The use of the memory at one moment."""

    held: Slots
    unused: Slots
    written: Slots  # by the steps in flight
    leaving: Slots  # of ended sequences named by steps in flight
    idle: Slots
    swapped: Slots


KINDS = tuple(Use.__slots__)


@dataclass(slots=True)
class Weighed:
    """Token-slot-seconds by kind and tenant, in all and by windows. What tenants share counts for each."""

    by_tenant: dict[str, defaultdict[str, float]] = field(
        default_factory=lambda: {kind: defaultdict(float) for kind in KINDS}
    )
    held: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # by window
    unused: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, use: Use, start: float, end: float) -> None:
        """Add what was used in the same way from `start` to `end`."""
        for kind in KINDS:
            slot_seconds = self.by_tenant[kind]
            for tenant, slots in getattr(use, kind).items():
                slot_seconds[tenant] += slots * (end - start)
        held, unused = sum(use.held.values()), sum(use.unused.values())
        while start < end:
            window = int(start // WINDOW_SECONDS)
            until = min(end, (window + 1) * WINDOW_SECONDS)
            self.held[window] += held * (until - start)
            self.unused[window] += unused * (until - start)
            start = until

    def total(self, kind: str) -> float:
        return sum(self.by_tenant[kind].values())

    @property
    def waste(self) -> float:
        return self.total("unused") / self.total("held")

    def waste_of(self, tenant: str) -> float:
        return self.by_tenant["unused"][tenant] / self.by_tenant["held"][tenant]

    @property
    def worst_tenant(self) -> str:
        return max(self.by_tenant["held"], key=self.waste_of)

    @property
    def worst_window(self) -> float:
        """The waste of the worst window with at least a tenth of the usual memory held."""
        least = sum(self.held.values()) / len(self.held) / 10
        return max(self.unused[window] / held for window, held in self.held.items() if held >= least)


class WeighingLoop(Loop):
    """A `Loop` that weighs memory: as it is once everything has happened that happens at one moment, until the next."""

    weighed: Weighed
    _use: Use | None = None
    _since = 0.0

    def _plan(self, now: float) -> None:
        if self._use is not None and now > self._since:
            self.weighed.add(self._use, self._since, now)
        super()._plan(now)
        self._use, self._since = self._used(), now

    def _used(self) -> Use:
        scheduler = self._core.scheduler
        accounts, size = KVAccounts(scheduler.kv_manager), scheduler.config.block_size
        written, leaving = defaultdict[str, float](float), dict[str, Sequence]()
        for step in scheduler.in_flight:
            for sequence, length in zip(step.sequences, step.batch.lengths, strict=True):
                written[sequence.tenant] += length
                if sequence.status is SequenceStatus.FINISHED:
                    leaving[sequence.id] = sequence
        left = Counter[str]()
        for sequence in leaving.values():
            left[sequence.tenant] += sequence.block_table.num_charged
        held, idle, swapped = (
            _slots(kind, size) for kind in (accounts.held(), accounts.cache.idle_by_tenant(), accounts.host.held)
        )
        return Use(held, accounts.unused_slots(), written, _slots(left, size), idle, swapped)


def _slots(blocks: Mapping[str, int], block_size: int) -> Slots:
    return {tenant: count * block_size for tenant, count in blocks.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, served with memory allocated in one way."""

    weighed: Weighed
    seconds: float
    busy: float  # share of the time
    first_tokens: list[float]  # seconds, sorted
    preemptions: int


def main(arguments: list[str] | None = None) -> int:
    parser: ArgumentParser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="Azure's (CSV) and Mooncake's (JSON lines)")
    options = parser.parse_args(arguments)
    report = Report("kv_waste", options.quick)
    for name, arrivals in _workloads(options.trace, options.quick).items():
        runs = {allocation: simulate(arrivals, allocation) for allocation in ALLOCATIONS}
        report.add_table(
            f"{name}: shares of what is held; idle and swapped beside it, on average",
            [_row(allocation, run) for allocation, run in runs.items()],
        )
        weighed = runs[BLOCKS_OF_16].weighed
        report.add_table(f"{name}, by tenant, blocks of 16", list(_tenant_rows(weighed)))
        report.at_most(f"waste in blocks of 16, {name}", weighed.waste, MOST_WASTE)
        worst = weighed.worst_tenant
        report.at_most(f"the same of the worst tenant ({worst}), {name}", weighed.waste_of(worst), MOST_WASTE)
        report.at_most(f"the same in the worst minute, {name}", weighed.worst_window, MOST_WASTE)
    return report.finish(options.results)


def _workloads(traces: list[Path], quick: bool) -> dict[str, list[Arrival]]:
    if traces:
        return {path.name: _traced(path, quick) for path in traces}
    random, now, drawn = Random(SEED), 0.0, list[Arrival]()
    for session, one in enumerate(drawn_trace(SEED, 100 if quick else DRAWN)):
        now += random.expovariate(DRAWN_RATE)
        drawn.append(one._replace(time=now, session=session))
    made = conversations(SEED, 20 if quick else SESSIONS)
    return {"drawn": with_tenants(drawn, SHARES, SEED), "conversations": with_tenants(made, SHARES, SEED)}


def _traced(path: Path, quick: bool) -> list[Arrival]:
    arrivals = read_trace(path)
    has_contents = arrivals[0].content is not None
    slower = MOONCAKE_SLOWER if has_contents else AZURE_SLOWDOWN_RATIO
    most = 100 if quick else MOONCAKE_REQUESTS if has_contents else len(arrivals)
    return with_tenants([one._replace(time=one.time * slower) for one in arrivals[:most]], SHARES, SEED)


def simulate(arrivals: list[Arrival], allocation: Allocation) -> Run:
    declared = [arrival._replace(max_tokens=allocation.max_tokens) for arrival in arrivals]
    longest = max(arrival.prompt_tokens + max(arrival.output_tokens, MAX_TOKENS) for arrival in arrivals)
    policy = parse_simulated_policy(f"{CORE},{ENGINE},max_model_len={longest},{allocation.settings}", DEVICE)
    recorder = Recorder(DEVICE, Objective(), policy.weights)
    loop = WeighingLoop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len)
    loop.weighed = Weighed()
    gc.disable()
    try:
        end = loop.run(declared)
    finally:
        gc.enable()
    return Run(loop.weighed, end, recorder.busy / end, sorted(recorder.first_token_times), recorder.preemptions)


def _row(allocation: Allocation, run: Run) -> dict[str, object]:
    weighed = run.weighed
    held, idle, swapped = (
        weighed.total(kind) * TOKEN_BYTES / GIB / run.seconds for kind in ("held", "idle", "swapped")
    )
    return {
        "memory": allocation.name,
        "held GiB": held,
        "unused %": 100 * weighed.waste,
        "worst tenant %": 100 * weighed.waste_of(weighed.worst_tenant),
        "worst minute %": 100 * weighed.worst_window,
        "written %": 100 * weighed.total("written") / weighed.total("held"),
        "leaving %": 100 * weighed.total("leaving") / weighed.total("held"),
        "idle GiB": idle,
        "swapped GiB": swapped,
        "busy %": 100 * run.busy,
        "TTFT p50 s": quantile(run.first_tokens, 0.5),
        "TTFT p99 s": quantile(run.first_tokens, 0.99),
        "preemptions": run.preemptions,
    }


def _tenant_rows(weighed: Weighed) -> Iterable[dict[str, object]]:
    for tenant in sorted(weighed.by_tenant["held"]):
        gib_seconds = {f"{kind} GiB s": weighed.by_tenant[kind][tenant] * TOKEN_BYTES / GIB for kind in KINDS}
        yield {"tenant": tenant, **gib_seconds, "unused %": 100 * weighed.waste_of(tenant)}


if __name__ == "__main__":
    sys.exit(main())
