"""Records a simulated run: each request's times, each tenant's service, and the queue over time."""

from array import array
from collections import Counter, abc, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from admission.promise import Promise
from admission.share import weight_of
from admission.step_times.step_time import StepWork
from backend.scheduler.batch import Batch
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.sequence import Sequence
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.statistics import MAX_GAP_TENANTS, QuantileHistogram, ServiceGap, Timeline

PROMPT_TOKEN_WEIGHT, OUTPUT_TOKEN_WEIGHT = 1.0, 2.0  # service in tokens, by the weights of VTC (Sheng et al., 2024)


@dataclass(frozen=True, slots=True)
class Objective:
    """The latencies of a good request: its first token, and then on average each token, comes within these seconds.

    A deadline that a request has of its own takes the place of `first_token`.
    """

    first_token: float = 2.0
    per_token: float = 0.1


class AttemptOutcome(StrEnum):
    """The outcome of one attempt of a request."""

    GOOD = "good"
    LATE = "late"  # completed, but missed the objective
    REFUSED = "refused"
    EXPIRED = "expired"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class ClassRecord:
    """The served or refused requests of one class."""

    offered: int = 0
    completed: int = 0
    good: int = 0
    refused: int = 0
    first_token_times: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class TenantRecord:
    """One tenant's requests and the service it got."""

    name: str
    weight: float
    offered: int = 0
    completed: int = 0
    good: int = 0
    refused: int = 0
    prompt_tokens: int = 0  # computed for the first time
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    output_tokens: int = 0
    seconds: float = 0.0  # of the device
    waiting: int = 0
    backlogged_since: float = 0.0
    backlogged_seconds: float = 0.0
    backlogged_service: float = 0.0  # service during its backlog
    service_before: float = 0.0  # service before its backlog
    interrupted: bool = False  # its backlog ended since the last step
    first_token_times: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def service(self) -> float:
        """The service in weighted tokens."""
        return PROMPT_TOKEN_WEIGHT * self.prompt_tokens + OUTPUT_TOKEN_WEIGHT * self.output_tokens


@dataclass(slots=True)
class TrackedRequest:
    """A queued or running request."""

    arrival: Arrival
    tenant: TenantRecord
    waiting: bool = False
    first_token: float = -1.0
    last_token: float = -1.0
    num_prefilled: int = 0


class PlannedWork(NamedTuple):
    """The work of a planned step."""

    by_tenant: Mapping[str, StepWork]
    prefill: StepWork | None  # of all prompts in it


class StepInFlight(NamedTuple):
    """A step that the device computes."""

    done_at: float
    elapsed: float
    batch: Batch
    work: PlannedWork


class Recorder:
    """Keeps the figures of a run. The loop notifies it of all events, in order of time; it changes nothing."""

    def __init__(
        self,
        device: Device,
        objective: Objective | None,
        weights: Mapping[str, float],
        followed: Collection[str] | None = None,
    ) -> None:
        """Without an `objective` a request is good when it keeps the targets of its own class. Gaps are measured
        between the tenants `followed`, `MAX_GAP_TENANTS` at most; None: the first that come.
        """
        assert followed is None or len(followed) <= MAX_GAP_TENANTS
        self.tenants: dict[str, TenantRecord] = {}
        self.classes: defaultdict[int, ClassRecord] = defaultdict(ClassRecord)
        self.refusals: Counter[str] = Counter()
        self.first_token_times = array("d")
        self.token_times = array("d")  # a request's mean time per output token after the first
        self.durations = array("d")
        self.session_times = array("d")  # from a session's first request to the end of its last answer
        self.intervals = QuantileHistogram()  # between the tokens of a request
        self.depth, self.age = Timeline(), Timeline()
        self.gap_tokens, self.gap_seconds = ServiceGap(), ServiceGap()
        self.busy = 0.0
        self.prefill_seconds = 0.0  # part of the busy seconds: a step's time is divided by marginal costs
        self.good_tokens = 0  # of the answers of good requests
        self.steps = 0
        self.preemptions = 0
        self.left = 0  # gave up waiting
        self.lost = 0  # ended for lack of memory
        self.given_up = 0  # expired by the core
        self.outcomes: list[tuple[Arrival, AttemptOutcome]] = []  # of every attempt, in the order of their ends
        self._device, self._objective, self._weights = device, objective, weights
        self._tracked: dict[Sequence, TrackedRequest] = {}
        self._waiting: set[Sequence] = set()
        self._oldest: list[tuple[float, int, Sequence]] = []  # heap with lazy deletion
        self._to_follow = followed
        self._followed: list[TenantRecord] = []
        self._last_completion = -inf
        self._is_calm = False  # no waiting sequence since the last step
        self._decodes: list[Sequence] = []
        self._decode_work: dict[str, StepWork] = {}

    # requests

    def offered(self, arrival: Arrival) -> TenantRecord:
        tenant = self.tenants.get(arrival.tenant) or self._new_tenant(arrival.tenant)
        tenant.offered += 1
        self.classes[arrival.priority_class].offered += 1
        return tenant

    def refused(self, arrival: Arrival, reason: str) -> None:
        self.tenants[arrival.tenant].refused += 1
        self.classes[arrival.priority_class].refused += 1
        self.refusals[reason] += 1
        self._note(arrival, AttemptOutcome.REFUSED)

    def queued(self, sequence: Sequence, arrival: Arrival, promise: Promise) -> None:
        self._tracked[sequence] = TrackedRequest(arrival, self.tenants[arrival.tenant])
        self._wait(sequence, arrival.time)

    def waits_for_first_token(self, sequence: Sequence) -> bool:
        request = self._tracked.get(sequence)
        return request is not None and request.first_token < 0

    def abandoned(self, sequence: Sequence, now: float) -> None:
        self.left += 1
        self._forget(sequence, AttemptOutcome.LEFT, now)

    def expired(self, sequence: Sequence, now: float) -> None:
        """Record a sequence that the core expired."""
        self.given_up += 1
        self._forget(sequence, AttemptOutcome.EXPIRED, now)

    def evicted(self, sequence: Sequence, now: float) -> None:
        """Record a sequence that the core ended for lack of memory."""
        self.lost += 1
        self._forget(sequence, AttemptOutcome.LOST, now)

    def withdrawn(self, sequence: Sequence, now: float) -> None:
        """Forget a queued sequence whose request was refused for another prompt, which counts for it."""
        self._leave_queue(sequence, now)
        del self._tracked[sequence]

    def cut_off(self, sequence: Sequence, reason: str, now: float) -> None:
        """Record an answer that a limit of its tenant ended."""
        self._leave_queue(sequence, now)
        self.refused(self._tracked.pop(sequence).arrival, f"{reason}, while answering")

    # steps

    def planned(self, scheduled: ScheduledStep, now: float) -> PlannedWork:
        """Record a planned step."""
        for sequence in scheduled.admitted:
            self._leave_queue(sequence, now)
        decodes, batch = scheduled.batch.num_decodes, scheduled.batch
        works = self._decodes_by_tenant(scheduled)
        if decodes == len(scheduled.sequences):
            return PlannedWork(works, None)
        works, prefill = dict(works), StepWork()
        for row in range(decodes, len(scheduled.sequences)):
            sequence, start, length = scheduled.sequences[row], batch.starts[row], batch.lengths[row]
            prefill = prefill.with_prefill(start, length)
            works[sequence.tenant] = works.get(sequence.tenant, _NOTHING).with_prefill(start, length)
            request = self._tracked[sequence]
            computed = min(start + length, request.arrival.prompt_tokens)
            cached = max(0, min(start, computed) - request.num_prefilled)
            request.tenant.cached_tokens += cached
            request.tenant.prompt_tokens += max(0, computed - request.num_prefilled - cached)
            request.num_prefilled = max(request.num_prefilled, computed)
        for sequence, _, _ in scheduled.forks:  # whose prompt counts for the answer that computes it
            self._tracked[sequence].num_prefilled = sequence.num_prompt_tokens
        return PlannedWork(works, prefill)

    def preempted(self, sequence: Sequence, now: float) -> None:
        """Record a preempted sequence; idempotent."""
        if not self._tracked[sequence].waiting:
            self.preemptions += 1
            self._wait(sequence, now)

    def completed(self, work: PlannedWork, elapsed: float, new_tokens: abc.Sequence[NewToken], now: float) -> None:
        self.steps += 1
        self.busy += elapsed
        self._share(work, elapsed)
        self._take(new_tokens, now)
        self._follow(now)

    def end(self, now: float) -> None:
        if self.steps:
            self.depth.add(self._last_completion, 0)
            self.age.add(self._last_completion, 0)
        for tenant in self.tenants.values():
            if tenant.waiting:
                self._close_backlog(tenant, now)

    # inside

    def _new_tenant(self, name: str) -> TenantRecord:
        tenant = self.tenants[name] = TenantRecord(name, weight_of(name, self._weights))
        if len(self._followed) < MAX_GAP_TENANTS if self._to_follow is None else name in self._to_follow:
            self._followed.append(tenant)
        return tenant

    def _wait(self, sequence: Sequence, now: float) -> None:
        request = self._tracked[sequence]
        tenant = request.tenant
        request.waiting, self._is_calm = True, False
        self._waiting.add(sequence)
        heappush(self._oldest, (request.arrival.time, id(sequence), sequence))
        tenant.waiting += 1
        if tenant.waiting == 1:
            tenant.backlogged_since, tenant.service_before = now, tenant.service

    def _leave_queue(self, sequence: Sequence, now: float) -> None:
        request = self._tracked[sequence]
        if not request.waiting:
            return
        request.waiting = False
        self._waiting.remove(sequence)
        request.tenant.waiting -= 1
        if request.tenant.waiting == 0:
            request.tenant.interrupted = True
            self._close_backlog(request.tenant, now)

    def _close_backlog(self, tenant: TenantRecord, now: float) -> None:
        tenant.backlogged_seconds += now - tenant.backlogged_since
        tenant.backlogged_service += tenant.service - tenant.service_before

    def _forget(self, sequence: Sequence, outcome: AttemptOutcome, now: float) -> None:
        self._leave_queue(sequence, now)
        self._note(self._tracked.pop(sequence).arrival, outcome)

    def _note(self, arrival: Arrival, outcome: AttemptOutcome) -> None:
        self.outcomes.append((arrival, outcome))

    def _decodes_by_tenant(self, scheduled: ScheduledStep) -> dict[str, StepWork]:
        """The work of decodes by tenant: mostly the previous step's, with one token more each."""
        decodes = scheduled.sequences[: scheduled.batch.num_decodes]
        if decodes == self._decodes:
            for tenant, work in self._decode_work.items():
                count = work.decode_tokens
                self._decode_work[tenant] = StepWork(0, count, work.decode_context + count)
            return self._decode_work
        counts: dict[str, int] = {}
        contexts: dict[str, int] = {}
        for sequence, start in zip(decodes, scheduled.batch.starts, strict=False):
            tenant = sequence.tenant
            counts[tenant] = counts.get(tenant, 0) + 1
            contexts[tenant] = contexts.get(tenant, 0) + start + 1
        self._decodes = decodes
        self._decode_work = {tenant: StepWork(0, counts[tenant], contexts[tenant]) for tenant in counts}
        return self._decode_work

    def _share(self, work: PlannedWork, elapsed: float) -> None:
        marginal = self._device.rates.marginal
        if len(work.by_tenant) == 1 and work.prefill is None:
            for tenant in work.by_tenant:
                self.tenants[tenant].seconds += elapsed
            return
        parts = [marginal(of_tenant) for of_tenant in work.by_tenant.values()]
        total = sum(parts)
        for tenant, part in zip(work.by_tenant, parts, strict=True):
            self.tenants[tenant].seconds += elapsed * (part / total if total else 1 / len(parts))
        if work.prefill is not None:
            self.prefill_seconds += elapsed * min(1.0, marginal(work.prefill) / total if total else 1.0)

    def _take(self, new_tokens: abc.Sequence[NewToken], now: float) -> None:
        previous, self._last_completion = self._last_completion, now
        tracked, usual = self._tracked, 0
        for sequence, _, reason in new_tokens:
            request = tracked[sequence]
            request.tenant.output_tokens += 1
            last = request.last_token
            request.last_token = now
            if last == previous:
                usual += 1
            elif last < 0:
                request.first_token = now
            else:
                self.intervals.add(now - last)
            if reason is not None:
                self._done(sequence, request, now)
        if usual:
            self.intervals.add(now - previous, usual)

    def _done(self, sequence: Sequence, request: TrackedRequest, now: float) -> None:
        del self._tracked[sequence]
        first = request.first_token - request.arrival.time
        later = len(sequence.output) - 1
        per_token = (now - request.first_token) / later if later else 0.0
        self.first_token_times.append(first)
        self.durations.append(now - request.arrival.time)
        if later:
            self.token_times.append(per_token)
        if request.arrival.began is not None and not request.arrival.turns:
            self.session_times.append(now - request.arrival.began)
        tenant, level = request.tenant, self.classes[sequence.request.priority_class]
        tenant.first_token_times.append(first)
        level.first_token_times.append(first)
        tenant.completed += 1
        level.completed += 1
        if self._is_good(sequence, request.arrival, first, per_token, now):
            self.good_tokens += len(sequence.output)
            tenant.good += 1
            level.good += 1
            self._note(request.arrival, AttemptOutcome.GOOD)
        else:
            self._note(request.arrival, AttemptOutcome.LATE)

    def _is_good(self, sequence: Sequence, arrival: Arrival, first: float, per_token: float, now: float) -> bool:
        if arrival.done_within is not None and now - arrival.time > arrival.done_within:
            return False
        wanted = inf if arrival.deadline is None else arrival.deadline
        if self._objective is not None:
            wanted = self._objective.first_token if arrival.deadline is None else wanted
            return first <= wanted and per_token <= self._objective.per_token
        return first <= min(wanted, sequence.request.first_token_target or inf) and per_token <= (
            sequence.request.token_interval or inf
        )

    def _follow(self, now: float) -> None:
        if self._is_calm and not self._waiting:
            return
        self.depth.add(now, len(self._waiting))
        self.age.add(now, now - self._oldest_arrival(now))
        followed = self._followed
        backlogged = [tenant.waiting > 0 and not tenant.interrupted for tenant in followed]
        if sum(backlogged) > 1 or self.gap_tokens.watching:
            self.gap_tokens.observe([tenant.service / tenant.weight for tenant in followed], backlogged)
            self.gap_seconds.observe([tenant.seconds / tenant.weight for tenant in followed], backlogged)
        for tenant in followed:
            tenant.interrupted = False
        self._is_calm = not self._waiting and not self.gap_tokens.watching

    def _oldest_arrival(self, now: float) -> float:
        while self._oldest and self._oldest[0][2] not in self._waiting:
            heappop(self._oldest)
        return self._oldest[0][0] if self._oldest else now


_NOTHING = StepWork()
