"""Recent history of the gateway in bounded memory: seconds, ended requests, refusals, and sums by tenant."""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import merge

from admission.outcome import Outcome
from admission.share import Account
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import SequenceStatus
from gateway.admin.logged_texts import LoggedTexts
from gateway.admin.request_database import RequestDatabase
from gateway.admin.request_summary import RequestSummary
from gateway.admin.rows import is_waiting
from gateway.admin.series import Gauges, RecentSeries
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import RequestRecord, Telemetry

WINDOW_TICKS = 60  # ticks, of a second each
_ROUNDING_ERROR_SECONDS = 1e-12  # rounding error of an empty sum


class Shares:
    """Engine time by tenant: since the start, and over the last minute."""

    def __init__(self) -> None:
        self.total: Mapping[str, float] = {}
        self._recent: Counter[str] = Counter()
        self._recent_of_all = 0.0
        self._ticks: deque[dict[str, float]] = deque()

    def tick(self, total: Mapping[str, float]) -> None:
        """Take the engine time of each tenant since the start, `total`, and keep it."""
        before, self.total = self.total, total
        grown = {name: more for name, spent in total.items() if (more := spent - before.get(name, 0.0))}
        self._add(grown, 1)
        self._ticks.append(grown)
        if len(self._ticks) > WINDOW_TICKS:
            self._add(self._ticks.popleft(), -1)
        self._recent_of_all = sum(self._recent.values())

    def _add(self, service: Mapping[str, float], sign: int) -> None:
        for name, spent in service.items():
            self._recent[name] += sign * spent  # type: ignore[assignment]  # a counter of floats
            if abs(self._recent[name]) < _ROUNDING_ERROR_SECONDS:
                del self._recent[name]

    def recent(self) -> dict[str, float]:
        """The service of the last minute by tenant, without idle tenants."""
        return dict(self._recent)

    def share(self, tenant: str) -> float:
        """Return the tenant's share of all service in the last minute, from 0 to 1."""
        everyone = self._recent_of_all
        return min(max(self._recent[tenant] / everyone, 0.0), 1.0) if everyone > 0 else 0.0


MAX_ENDED_REQUESTS = 1000
MAX_REFUSALS = 200
MAX_UNAUTHENTICATED_REFUSALS = 50  # refusals without a valid key, which must not evict the others
REFUSED = frozenset({Outcome.REFUSED, Outcome.EXPIRED})


@dataclass(slots=True)
class Totals:
    """Counts the ended requests of one tenant and their tokens."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class History:
    """Keeps the admin page's history of requests and steps, on the event loop; no work per token."""

    def __init__(
        self,
        telemetry: Telemetry,
        scheduler: Scheduler,
        accounts: Mapping[str, Account],
        database: RequestDatabase | None = None,
        texts: LoggedTexts | None = None,
    ) -> None:
        """`accounts` by tenant, as `admission.share.Share` keeps them. `database` keeps every ended request, beyond
        the latest here, and `texts` finds what it keeps of prompts and answers.
        """
        self.series = RecentSeries(telemetry.clock)
        self.shares = Shares()
        self.totals: dict[str, Totals] = {}
        self.ended: deque[RequestSummary] = deque(maxlen=MAX_ENDED_REQUESTS)  # oldest first
        self._refusals: deque[RequestSummary] = deque(maxlen=MAX_REFUSALS)
        self._unauthenticated: deque[RequestSummary] = deque(maxlen=MAX_UNAUTHENTICATED_REFUSALS)
        self._telemetry = telemetry
        self._scheduler, self._accounts = scheduler, accounts
        self._database, self._texts = database, texts
        self._last_step = float("-inf")  # moment of its completion

    def request_ended(self, record: RequestRecord) -> None:
        generates = record.operation is not None
        if not (generates or record.error):
            return
        summary = RequestSummary.of(record)
        if self._database is not None and record.tenant is not None:
            self._database.add(summary, None if self._texts is None else self._texts.of(record))
        if record.error is not None:
            (self._unauthenticated if record.tenant is None else self._refusals).append(summary)
        if generates:
            self.series.request_ended(record.outcome in REFUSED)
        if generates and record.tenant is not None:
            self.ended.append(summary)
            self._add_up(record.tenant, summary)

    def _add_up(self, tenant: str, summary: RequestSummary) -> None:
        totals = self.totals.get(tenant)
        if totals is None:
            totals = self.totals[tenant] = Totals()
        totals.requests += 1
        totals.refused += summary.outcome in REFUSED
        totals.prompt_tokens += summary.num_prompt_tokens
        totals.output_tokens += summary.num_output_tokens

    def step_completed(self, step: CompletedStep) -> None:
        gap, self._last_step = step.completed - self._last_step, step.completed
        self.series.step(step.elapsed, gap, step.num_decodes)
        for sequence in step.scheduled.sampled[step.scheduled.batch.num_decodes :]:
            if step.scheduled.has_brought_first(sequence):
                self.series.first_token(step.completed - sequence.arrival)

    def refusals(self) -> list[RequestSummary]:
        """Return the latest refusals, the newest first."""
        both = merge(reversed(self._refusals), reversed(self._unauthenticated), key=_ended, reverse=True)
        return list(both)[:MAX_REFUSALS]

    async def run(self) -> None:
        """Close each second as it ends, for as long as the server runs."""
        while True:
            await asyncio.sleep(1 - self._telemetry.clock() % 1)
            self.tick()

    def tick(self) -> None:
        """Close the past seconds."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        self.shares.tick({name: account.charged for name, account in self._accounts.items()})
        self.series.tick(
            Gauges(
                len(scheduler.running),
                self._waiting() if scheduler.waiting else {},
                self._waits(),
                scheduler.kv_manager.num_held,
                counters.prompt_tokens,
                counters.generation_tokens,
            )
        )

    def _waiting(self) -> dict[str, int]:
        return Counter(
            record.service_class or ""
            for record in self._telemetry.live
            for timeline in record.engine.timelines
            if is_waiting(timeline.sequence)
        )

    def _waits(self) -> list[float]:
        """Seconds without a first token so far, of each queued or prefilling sequence."""
        now = self._telemetry.clock()
        sequences = (timeline.sequence for record in self._telemetry.live for timeline in record.engine.timelines)
        return [now - s.arrival for s in sequences if not s.output and s.status is not SequenceStatus.FINISHED]


def _ended(summary: RequestSummary) -> float:
    return summary.ended or 0.0
