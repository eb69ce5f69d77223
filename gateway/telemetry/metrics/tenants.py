"""Metrics of tenants: memory, queue and use of each, and the outcomes of its requests."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from admission.controller import Controller
from admission.outcome import Outcome
from admission.share import Account
from backend.scheduler.kv_accounts import KVAccounts
from gateway.telemetry.metrics.labels import OTHER, TenantLabels
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline
from gateway.tenants.live_policy import LivePolicy

WINDOW_TICKS = 10  # of a second


def jain_fairness_index(shares: Iterable[float]) -> float | None:
    """Return 1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe, 1984); None of nothing."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def fairness_of(shares: list[float]) -> float:
    """Return Jain's index; 1 if nothing is shared, for then no tenant has less than another."""
    return jain_fairness_index(shares) or 1.0


class FairnessMeter:
    """Measures the fairness among tenants with work waiting at every tick of a window; other tenants got all they asked
    for.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._ticks: deque[tuple[Mapping[str, float], Set[str]]] = deque(maxlen=WINDOW_TICKS + 1)

    def tick(self, service: Mapping[str, float], waiting: Set[str]) -> None:
        """Record each tenant's service since the start, and the tenants with work waiting."""
        self._ticks.append((service, waiting))

    @property
    def index(self) -> float:
        """Returns the fairness over the last window; 1 until there has been one."""
        if len(self._ticks) <= WINDOW_TICKS:
            return 1.0
        rivals = set.intersection(*(set(waiting) for _, waiting in self._ticks))
        before, after = self._ticks[0][0], self._ticks[-1][0]
        served = [(after.get(name, 0.0) - before.get(name, 0.0)) / self._weight(name) for name in rivals]
        return fairness_of(served) if len(served) > 1 else 1.0


@dataclass(slots=True)
class TenantTotals:
    """The usage of a tenant, which never goes down. `service` is in seconds of engine time."""

    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, found in the prefix cache
    output_tokens: int = 0
    block_seconds: float = 0.0
    service: float = 0.0

    def add(self, timeline: SequenceTimeline, now: float) -> None:
        sequence = timeline.sequence
        self.prompt_tokens += sequence.num_billed_tokens
        self.cached_tokens += sequence.num_cached_tokens
        self.output_tokens += len(sequence.output)
        self.block_seconds += sequence.block_seconds(now)
        self.service += timeline.promise.charged


class TenantUsage:
    """Sums the tenants' use by label, which bounds its size."""

    def __init__(self, labels: TenantLabels, live: Iterable[RequestRecord]) -> None:
        """`live` are the requests that have not ended, at any time."""
        self._labels = labels
        self._live = live
        self._ended: dict[str, TenantTotals] = {}
        self._shown: dict[str, tuple[int, int]] = {}  # tokens of prompts, computed and cached

    def ended(self, record: RequestRecord) -> None:
        for timeline in record.engine.timelines:
            self._of(self._ended, timeline).add(timeline, record.ended or timeline.queued)

    def read(self, now: float) -> dict[str, TenantTotals]:
        """Returns the usage by label, in O(live requests).

        Tokens of prompts count when their step is planned. A lost step takes them back, but no counter goes down.
        """
        usage = {label: replace(one) for label, one in self._ended.items()}
        for record in self._live:
            for timeline in record.engine.timelines:
                if timeline.admitted is not None:  # the others have used nothing, and may be thousands
                    self._of(usage, timeline).add(timeline, now)
        for label, one in usage.items():
            computed, cached = self._shown.get(label, (0, 0))
            one.prompt_tokens, one.cached_tokens = max(one.prompt_tokens, computed), max(one.cached_tokens, cached)
            self._shown[label] = one.prompt_tokens, one.cached_tokens
        return usage

    def _of(self, usage: dict[str, TenantTotals], timeline: SequenceTimeline) -> TenantTotals:
        label = self._labels.of(timeline.sequence.tenant)
        if label not in usage:
            usage[label] = TenantTotals()
        return usage[label]


class TenantMetrics:
    """Metrics of the tenants' memory and use; `live` are the unfinished requests."""

    def __init__(
        self,
        registry: Registry,
        core: Controller,
        live: Iterable[RequestRecord],
        policies: LivePolicy,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._core, self._backlog = core, core.backlog
        self._kv = KVAccounts(core.scheduler.kv_manager)
        self._labels = TenantLabels()
        self._usage = TenantUsage(self._labels, live)
        self._shares = FairnessMeter(lambda tenant: policies.current.tenant(tenant).weight)
        self._block_bytes = block_bytes
        self._clock = clock
        self._requests = registry.counter(
            "sluice.tenant.requests", "Requests of a tenant that have ended.", ("tenant", "outcome")
        )
        for outcome in Outcome:
            self._requests.at(OTHER, outcome)
        self._used: Mapping[str, TenantTotals] = {}  # at the last reading
        self._served: dict[str, float] = {}
        self._show_held(registry)
        self._show_usage(registry)
        registry.gauge("sluice.jain_index", "Fairness among tenants that waited.", lambda: self._shares.index)

    def ended(self, record: RequestRecord) -> None:
        if record.operation is not None and record.outcome is not None and record.tenant is not None:
            self._requests[self._labels.of(record.tenant), record.outcome].value += 1
            self._usage.ended(record)

    def tick(self) -> None:
        """Compare the shares of tenants, once a second."""
        self._look()
        self._service()
        waiting = {self._labels.of(tenant) for tenant, _ in self._backlog.tenants()}
        self._shares.tick(dict(self._served), waiting - {OTHER})

    def _show_held(self, registry: Registry) -> None:
        def show(name: str, meaning: str, read: Callable[[], Iterable[tuple[str, float]]], unit: str = "") -> None:
            registry.read(Family(name, Kind.GAUGE, unit, meaning, ("tenant",)), lambda: _points(self._summed(read())))

        scheduler = self._core.scheduler
        running = scheduler.running
        show("sluice.running.sequences", "In the batch.", lambda: ((s.tenant, 1) for s in running.values()))
        show(
            "sluice.running.tokens", "In their contexts.", lambda: ((s.tenant, s.num_tokens) for s in running.values())
        )
        show("sluice.waiting.sequences", "Waiting for the engine.", self._waiting)
        backlog = self._backlog
        show("sluice.backlog", "Its engine time.", lambda: ((t, load.seconds) for t, load in backlog.tenants()), "s")
        kv, each = self._kv, self._block_bytes

        def show_blocks(name: str, meaning: str, count: Callable[[], Mapping[str, int]], size: float = each) -> None:
            show(name, meaning, lambda: ((tenant, number * size) for tenant, number in count().items()), "By")

        show_blocks("sluice.kv.bytes", "KV memory held.", kv.held)
        show_blocks("sluice.kv.charged", "KV memory held, or kept by the tenant's floor or pins.", kv.charged)
        show_blocks("sluice.kv.cached", "Idle KV memory of the prefix cache.", kv.cache.idle_by_tenant)
        show_blocks("sluice.kv.kept", "What of it the tenant's floor keeps.", kv.cache.kept_by_tenant)
        show_blocks("sluice.kv.pinned", "Idle KV memory that the tenant's pinned prompts keep.", kv.pinned)
        show_blocks("sluice.kv.swapped", "KV memory that the host has.", lambda: kv.host.held)
        per_slot = each / scheduler.config.block_size
        show_blocks("sluice.kv.wasted", "KV memory allocated that holds no token yet.", kv.unused_slots, per_slot)

    def _show_usage(self, registry: Registry) -> None:
        def show(name: str, meaning: str, unit: str, value: Callable[[TenantTotals], float]) -> None:
            family = Family(name, Kind.COUNTER, unit, meaning, ("tenant",))
            registry.read(family, lambda: [((label,), value(usage)) for label, usage in self._used.items()])

        block_bytes = self._block_bytes
        deficit = Family(
            "sluice.tenant.deficit",
            Kind.GAUGE,
            "s",
            "Engine time that it is owed for each unit of its weight; below 0, debt.",
            ("tenant",),
        )
        registry.read(deficit, self._credit)
        service = Family("sluice.tenant.service", Kind.COUNTER, "s", "Engine time used.", ("tenant",))
        registry.read(service, self._service)
        show(
            "sluice.kv.byte_seconds",
            "KV memory that was charged, times how long.",
            "By.s",
            lambda usage: usage.block_seconds * block_bytes,
        )
        drafting = self._core.scheduler.drafting

        def show_drafts(name: str, meaning: str, which: int) -> None:
            def read() -> list[Point]:
                counts = {} if drafting is None else drafting.counts
                return _points(self._summed((tenant, count[which]) for tenant, count in counts.items()))

            registry.read(Family(name, Kind.COUNTER, "", meaning, ("tenant",)), read)

        show_drafts("sluice.drafted_tokens", "Tokens drafted for its answers.", 0)
        show_drafts("sluice.accepted_tokens", "What of them its answers have.", 1)
        tokens = Family("sluice.tenant.tokens", Kind.COUNTER, "", "Tokens of a tenant.", ("tenant", "kind"))
        registry.read(tokens, self._tokens)
        registry.before.append(self._look)

    def _look(self) -> None:
        now = self._clock()
        self._used = {OTHER: TenantTotals()} | self._usage.read(now)
        for tenant, block_seconds in self._kv.cache.kept.all_block_seconds(now).items():
            self._used.setdefault(self._labels.of(tenant), TenantTotals()).block_seconds += block_seconds

    def _service(self) -> list[Point]:
        """The engine time of labelled tenants from their accounts, and of the others from their requests' charges.

        A correction may take back a part of a charge ahead, but the counter never goes down.
        """
        charged = {label: usage.service for label, usage in self._used.items()}
        charged |= {name: account.charged for name, account in self._accounts()}
        for label, value in charged.items():
            self._served[label] = max(value, self._served.get(label, 0.0))
        return _points(self._served)

    def _credit(self) -> list[Point]:
        credit = self._core.credit
        return _points({OTHER: 0} | {name: credit(name) for name, _ in self._accounts()})

    def _accounts(self) -> list[tuple[str, Account]]:
        """Returns the accounts of tenants that have series of their own."""
        accounts = self._core.share.accounts
        return [(name, accounts[name]) for name in self._labels.names if name in accounts]

    def _tokens(self) -> list[Point]:
        return [
            ((label, kind), count)
            for label, usage in self._used.items()
            for kind, count in (
                ("prompt", usage.prompt_tokens),
                ("cached", usage.cached_tokens),
                ("output", usage.output_tokens),
            )
        ]

    def _waiting(self) -> Iterable[tuple[str, float]]:
        return ((tenant, load.count) for tenant, load in self._backlog.tenants())

    def _summed(self, values: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Returns the sums by label, of which `OTHER` is always one."""
        sums: dict[str, float] = {OTHER: 0}
        for tenant, value in values:
            label = self._labels.of(tenant)
            sums[label] = sums.get(label, 0) + value
        return sums


def _points(values: Mapping[str, float]) -> list[Point]:
    return [((label,), value) for label, value in values.items()]
