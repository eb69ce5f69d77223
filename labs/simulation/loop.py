"""The core on a virtual clock: the engine's own cycle, with a device that only takes time.

As in `backend.engine`, requests that arrive at one moment are planned for together, on a completed step the core
accounts and plans at once, and steps run one after another in the order of their plans.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

from admission.controller import Controller
from admission.event_logs.names import REFUSALS
from admission.ledger import work_of
from admission.outcome import AdmissionRefused
from admission.request import EXTEND_MARGIN_TOKENS, EXTEND_STEP_TOKENS, EXTEND_TIMEOUT_S
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from labs.simulation.arrival import NO_TARGET, Arrival, ClassTarget, sequence_of
from labs.simulation.clients import Clients, NoRetries, Sessions
from labs.simulation.contents import SimulatedNames
from labs.simulation.device import Device
from labs.simulation.gateway_rules import (
    DEFAULT_RETRY_AFTER_SECONDS,
    GatewayRefused,
    GatewayRefusedForGood,
    SimulatedGateway,
    SimulatedGrant,
)
from labs.simulation.host import Host
from labs.simulation.recorder import PlannedWork, Recorder, StepInFlight
from labs.simulation.sampled_tokens import SampledTokens


@dataclass(slots=True)
class _RunningRequest:
    """A request admitted by the gateway."""

    grant: SimulatedGrant
    running: set[Sequence]
    prompts: dict[str, int] = field(default_factory=dict)  # prompt tokens, cached ones included, of ended answers
    output_tokens: int = 0


@dataclass(slots=True)
class _Extension:
    """The state of an answer that may outgrow its reservation."""

    give_up: float = inf  # end of its patience for a refill
    refusal: GatewayRefused | None = None  # the final refusal


class Loop:
    """Drives one core through one workload, once. Deterministic."""

    def __init__(
        self,
        core: Controller,
        device: Device,
        recorder: Recorder,
        max_model_len: int,
        clients: Clients | None = None,
        target: Callable[[int], ClassTarget] = lambda _: NO_TARGET,
        gateway: SimulatedGateway | None = None,
    ) -> None:
        """A `gateway` gives each request its class with its target, and may refuse it; without one, each enters the
        class that it came with.
        """
        self._core = core
        self._device = device
        self._recorder = recorder
        self._max_model_len = max_model_len
        self._target = gateway.target if gateway else target  # by class
        self._gateway = gateway
        self._clients = clients or NoRetries()
        self._engine = core.scheduler.config
        self._host = Host(device.host)
        self._copied_at = 0.0  # end of the newest copies ahead of their steps
        self._names = SimulatedNames(core.scheduler.config.block_size)
        core.scheduler.name_blocks_by(self._names)
        self._due: list[tuple[float, int, Arrival]] = []  # heap of future arrivals
        self._steps: deque[StepInFlight] = deque()
        self._done_at = 0.0  # of the newest step
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._number, self._expected = count(), count()
        self._sampled_tokens = SampledTokens()
        self._allowed: set[str] = set()  # tenants with KV and cache limits set
        self._num_arrived = 0
        self._requests: dict[Sequence, _RunningRequest] = {}  # of requests admitted by a gateway
        self._extensions: dict[Sequence, _Extension] = {}
        self._sessions = Sessions()
        if core.calibrates:
            core.calibrated(device.calibration(self._engine), 0.0)

    def run(self, arrivals: Iterable[Arrival], until: float = inf) -> float:
        """Run all arrivals, in order of time, to their ends or to a time; returns the end of the last step, in
        seconds.
        """
        self.expect(arrivals)
        self.advance(until)
        return self.end(until)

    def expect(self, arrivals: Iterable[Arrival]) -> None:
        """Add arrivals, each at its time."""
        for arrival in arrivals:
            heappush(self._due, (arrival.time, next(self._expected), arrival))

    def advance(self, until: float) -> None:
        """Process all events until a time, which is not before the last call's."""
        self._settle_until(until)
        while self._due and (now := self._due[0][0]) <= until:
            while self._due and self._due[0][0] == now:
                self._arrive(heappop(self._due)[2], now)
            self._plan(now)
            self._settle_until(until)

    def end(self, until: float = inf) -> float:
        """End the run; returns the end of the last step, in seconds, or `until` if that is earlier."""
        end = min(self._done_at, until)
        self._recorder.end(end)
        return end

    @property
    def is_over(self) -> bool:
        """True without future arrivals or running work."""
        return self.next_at == inf

    @property
    def next_at(self) -> float:
        """The time of the next event; inf: none."""
        heads = [self._due[0][0] if self._due else inf, self._steps[0].done_at if self._steps else inf]
        return min(*heads, self._timers[0][0] if self._timers else inf)

    def _settle_until(self, until: float) -> None:
        """Process all events except arrivals until `until` or the next arrival: an ended answer may add one."""
        due, steps, timers = self._due, self._steps, self._timers
        while True:
            last = until if not due or due[0][0] > until else due[0][0]
            if timers and timers[0][0] <= last and not (steps and steps[0].done_at <= timers[0][0]):
                now, _, act = heappop(timers)
                act(now)
            elif steps and steps[0].done_at <= last:
                self._complete(steps.popleft())
            else:
                return

    def _arrive(self, arrival: Arrival, now: float) -> None:
        if self._gateway is not None:
            arrival = self._gateway.served(arrival)
        self._clients.sent(arrival)
        self._num_arrived += 1
        prompts = arrival.prompts
        for prompt in prompts:
            self._recorder.offered(prompt)
        if max(prompt.most_tokens for prompt in prompts) > self._max_model_len:
            self._note_refused(prompts, "TooLong")
        elif self._gateway is not None:
            self._enter(self._gateway, arrival, prompts, now)
        elif arrival.refused_by is not None:
            self._note_refused(prompts, arrival.refused_by)
        else:
            for prompt in prompts:
                self._enter_freely(prompt, now)

    def _enter_freely(self, arrival: Arrival, now: float) -> None:
        try:
            self._queue(arrival, arrival.declared_tokens, now)
        except AdmissionRefused as refusal:
            self._refused(arrival, refusal, now)

    def _enter(self, gateway: SimulatedGateway, arrival: Arrival, prompts: Collection[Arrival], now: float) -> None:
        try:
            self._admit_all(gateway, arrival, prompts, now)
        except AdmissionRefused as refusal:
            self._refused(arrival, refusal, now)

    def _admit_all(self, gateway: SimulatedGateway, arrival: Arrival, prompts: Collection[Arrival], now: float) -> None:
        """Admit all prompts of a request, or none: raises `AdmissionRefused`."""
        grant = gateway.reserve(arrival, self._core.lengths, now)
        if arrival.tenant not in self._allowed:
            self._allowed.add(arrival.tenant)
            self._core.allow(arrival.tenant, gateway.allowed_blocks(arrival.tenant), now)
            if (limits := gateway.cache_limits(arrival.tenant)) != (0, None):
                self._core.limit_cache(arrival.tenant, *limits, now)
        request = _RunningRequest(grant, set())
        try:
            for prompt, tokens in zip(prompts, grant.tokens, strict=True):
                sequence = self._queue(prompt, tokens, now)
                request.running.add(sequence)
                self._requests[sequence] = request
                if sequence.token_limit < sequence.request.most_tokens:
                    self._extensions[sequence] = _Extension()
                    self._extend(sequence, now)
        except AdmissionRefused:
            self._withdraw(request, now)
            raise

    def _queue(self, prompt: Arrival, tokens: int, now: float) -> Sequence:
        """Queue a prompt at the core, with `tokens` reserved for its answer at first. Raises `AdmissionRefused`."""
        number = next(self._number)
        sequence = sequence_of(number, prompt, now, self._target(prompt.priority_class))
        if prompt.group is not None:
            sequence.prompt_group = f"{self._num_arrived}.{prompt.group}"
        sequence.limit_to(tokens)
        self._names.arrives(sequence, self._scope(prompt), prompt.content)
        self._host.serve()
        try:
            promise = self._core.arrive(sequence, now)
        except AdmissionRefused:
            self._names.forget(sequence)
            raise
        self._recorder.queued(sequence, prompt, promise)
        self._sessions.sent(sequence, prompt)
        if prompt.patience < inf:
            self._at(now + prompt.patience, partial(self._leave, sequence))
        return sequence

    def _scope(self, prompt: Arrival) -> str:
        """The name of the prompt's sharing scope."""
        if self._gateway is not None:
            return self._gateway.cache_scope(prompt.tenant)
        if prompt.content is not None and prompt.content.scope is not None:
            return prompt.content.scope
        return prompt.tenant

    def _withdraw(self, request: _RunningRequest, now: float) -> None:
        """Withdraw the queued prompts of a request of which another prompt is refused."""
        for sequence in list(request.running):
            self._core.finish_sequence(sequence, FinishReason.CANCELLED, now)
            self._recorder.withdrawn(sequence, now)
            self._ended(sequence)
        if not request.running:
            request.grant.settle(0, 0)

    def _refused(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> None:
        reason = refusal.reason if isinstance(refusal, GatewayRefused) else REFUSALS[type(refusal)]
        self._note_refused(arrival.prompts, reason)
        again = self._clients.retry(arrival, refusal, now)
        if again is not None:
            heappush(self._due, (again.time, -next(self._number), again))

    def _note_refused(self, prompts: Iterable[Arrival], reason: str) -> None:
        for prompt in prompts:
            self._recorder.refused(prompt, reason)

    def _leave(self, sequence: Sequence, now: float) -> None:
        if self._recorder.waits_for_first_token(sequence):
            self._core.finish_sequence(sequence, FinishReason.CANCELLED, now)
            self._recorder.abandoned(sequence, now)
            self._ended(sequence)
            self._plan(now)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heappush(self._timers, (time, next(self._number), act))

    def _ended(self, sequence: Sequence) -> None:
        """Record the end of an answer, with any outcome; a request's last one ends the request."""
        self._sessions.ended(sequence)
        self._host.serve()
        request = self._requests.pop(sequence, None)
        if request is None:
            return
        self._extensions.pop(sequence, None)
        request.running.remove(sequence)
        counted = request.prompts.get(sequence.prompt_group or sequence.id, 0)
        request.prompts[sequence.prompt_group or sequence.id] = max(counted, sequence.num_prefilled_tokens)
        request.output_tokens += len(sequence.output)
        if not request.running:
            request.grant.settle(sum(request.prompts.values()), request.output_tokens)

    def _plan(self, now: float) -> None:
        scheduler = self._core.scheduler
        while (batch := self._core.schedule(now)) is not None:
            if scheduler.preempted:
                self._note_preempted(now, scheduler.in_flight[-1].admitted)
            self._submit(batch, now)
        if scheduler.preempted:
            self._note_preempted(now)
        if not self._steps and (wakes_at := self._core.wakes_at) is not None:
            self._at(wakes_at, self._plan)
        for sequence in self._core.take_ended():
            if sequence.finish_reason is FinishReason.EXPIRED:
                self._recorder.expired(sequence, now)
            else:
                self._recorder.evicted(sequence, now)
            self._ended(sequence)

    def _note_preempted(self, now: float, back: Collection[Sequence] = ()) -> None:
        """Record preempted sequences, and sequences that the same plan has admitted again, `back`."""
        for sequence in self._core.scheduler.preempted:
            if sequence.status in (SequenceStatus.PREEMPTED, SequenceStatus.WAITING) or sequence in back:
                self._recorder.preempted(sequence, now)

    def _submit(self, batch: Batch, now: float) -> None:
        scheduled = self._core.scheduler.in_flight[-1]
        elapsed = self._seconds(scheduled) + self._copy(batch.num_copies, now)
        self._done_at = self._host.launch(len(batch.slots), now, self._done_at) + elapsed
        for sequence in scheduled.admitted:
            self._sampled_tokens.admitted(sequence, batch.step)
        self._steps.append(StepInFlight(self._done_at, elapsed, batch, self._work(scheduled, now)))

    def _seconds(self, scheduled: ScheduledStep) -> float:
        """The device's seconds for a step, without copies."""
        return self._device.seconds(work_of(scheduled))

    def _work(self, scheduled: ScheduledStep, now: float) -> PlannedWork:
        """The work by which a step is divided among its tenants."""
        return self._recorder.planned(scheduled, now)

    def _output(self, step: StepInFlight) -> StepOutput:
        """The output of a complete step."""
        return StepOutput(step.batch.step, self._sampled_tokens.of_step(step.batch), step.elapsed)

    def _copy(self, copies: int, now: float) -> float:
        """Add `copies` to the step being planned; returns the seconds by which they prolong it."""
        seconds = copies * self._engine.block_copy_seconds
        if not (copies and self._engine.copies_run_ahead):
            return seconds
        self._copied_at = max(self._copied_at, now) + seconds
        return max(0.0, self._copied_at - max(self._done_at, now))

    def _complete(self, step: StepInFlight) -> None:
        new_tokens = self._core.update_from_output(self._output(step), step.done_at)
        self._recorder.completed(step.work, step.elapsed, new_tokens, step.done_at)
        for following in self._sessions.answered(new_tokens, step.done_at):
            heappush(self._due, (following.time, -next(self._number), following))
        if self._requests:
            self._note_tokens(new_tokens, step.done_at)
        self._plan(step.done_at)

    def _note_tokens(self, new_tokens: Iterable[NewToken], now: float) -> None:
        for sequence, _, reason in new_tokens:
            if reason is not None:
                self._ended(sequence)
            elif sequence in self._extensions:
                self._extend(sequence, now)

    def _extend(self, sequence: Sequence, now: float) -> None:
        """Extend an answer before its reserved tokens run out, as `gateway.api.quota_extender` does."""
        extension, grant = self._extensions[sequence], self._requests[sequence].grant
        if extension.refusal is not None:
            self._cut_off(sequence, extension.refusal, now)
            return
        if extension.give_up < inf:
            return  # it waits for a refill
        while _left(sequence) <= EXTEND_MARGIN_TOKENS and sequence.token_limit < sequence.request.most_tokens:
            more = min(EXTEND_STEP_TOKENS, sequence.request.most_tokens - sequence.token_limit)
            try:
                grant.extend(more, now)
            except GatewayRefused as refusal:
                self._wait_for_refill(sequence, refusal, now)
                return
            self._core.raise_token_limit(sequence, more, now)

    def _wait_for_refill(self, sequence: Sequence, refusal: GatewayRefused, now: float) -> None:
        extension = self._extensions[sequence]
        extension.give_up = min(extension.give_up, now + EXTEND_TIMEOUT_S)
        if isinstance(refusal, GatewayRefusedForGood) or now > extension.give_up:
            extension.refusal = refusal
            self._cut_off(sequence, refusal, now)
        else:
            self._at(
                now + min(refusal.wait or DEFAULT_RETRY_AFTER_SECONDS, EXTEND_TIMEOUT_S),
                partial(self._ask_again, sequence),
            )

    def _ask_again(self, sequence: Sequence, now: float) -> None:
        extension = self._extensions.get(sequence)
        if extension is None:
            return
        given_up, extension.give_up = extension.give_up, inf
        grant, more = (
            self._requests[sequence].grant,
            min(EXTEND_STEP_TOKENS, sequence.request.most_tokens - sequence.token_limit),
        )
        try:
            grant.extend(more, now)
        except GatewayRefused as refusal:
            extension.give_up = given_up
            self._wait_for_refill(sequence, refusal, now)
        else:
            self._core.raise_token_limit(sequence, more, now)
            self._extend(sequence, now)
        self._plan(now)

    def _cut_off(self, sequence: Sequence, refusal: GatewayRefused, now: float) -> None:
        """End an answer after its last reserved token, since more are refused."""
        if _left(sequence) <= 0:
            self._core.finish_sequence(sequence, FinishReason.CANCELLED, now)
            self._recorder.cut_off(sequence, refusal.reason, now)
            self._ended(sequence)


def _left(sequence: Sequence) -> int:
    """The tokens that a sequence may still generate at present."""
    return sequence.token_limit - sequence.num_prompt_tokens - len(sequence.output)
