"""The core on a virtual clock: the engine's own cycle, with a device that only takes time.

As in `backend.engine`: requests that arrive at one moment are queued and then planned for together; on a completed step
the core accounts and plans at once; steps run one after another in the order of their plans.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from admission.ledger import work_of
from admission.outcome import Refused
from admission.simulation.arrival import Arrival
from admission.simulation.clients import Clients, Resigned
from admission.simulation.device import Device
from admission.simulation.recorder import Recorder
from admission.simulation.target import NO_TARGET, Target
from admission.step_time import StepWork
from backend.batch import Batch, StepOutput
from backend.flight import Delta
from backend.sampling import SamplingParams
from backend.scheduler import Scheduler
from backend.sequence import FinishReason, Sequence, Status

TOKEN, END = 0, 1
_NEVER, _AT_END = frozenset[int](), frozenset((END,))
_SAMPLING = SamplingParams()


class _Step(NamedTuple):
    done_at: float
    elapsed: float
    batch: Batch
    works: Mapping[str, StepWork]  # by tenant


class Core(Protocol):
    """What `backend.engine` asks of a core, and a look at its scheduler."""

    scheduler: Scheduler

    def arrive(self, sequence: Sequence, now: float) -> None: ...

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None: ...

    def plan(self, now: float) -> Batch | None: ...

    def take_ended(self) -> list[Sequence]: ...

    def complete(self, output: StepOutput, now: float) -> list[Delta]: ...


class Loop:
    """Drives one core through one workload, once. Deterministic."""

    def __init__(
        self,
        core: Core,
        device: Device,
        recorder: Recorder,
        max_model_len: int,
        clients: Clients | None = None,
        target: Callable[[int], Target] = lambda _: NO_TARGET,
    ) -> None:
        self._core = core
        self._device = device
        self._recorder = recorder
        self._max_model_len = max_model_len
        self._target = target  # by class
        self._clients = clients or Resigned()
        self._due: list[tuple[float, int, Arrival]] = []  # heap of what is yet to arrive
        self._steps: deque[_Step] = deque()
        self._done_at = 0.0  # of the newest step
        self._patience: list[tuple[float, int, Sequence]] = []
        self._number = count()
        self._ends: dict[int, int] = {}  # by slot: the position at which an answer ends that may be longer

    def run(self, arrivals: Iterable[Arrival], until: float = inf) -> float:
        """All of them, in order of time, to their ends or to a time; returns when the last step ended, in seconds."""
        for number, arrival in enumerate(arrivals):
            heappush(self._due, (arrival.time, number, arrival))
        while self._due and (now := self._due[0][0]) <= until:
            self._advance(now)
            while self._due and self._due[0][0] == now:
                self._arrive(heappop(self._due)[2], now)
            self._plan(now)
        self._advance(until)
        end = min(self._done_at, until)
        self._recorder.end(end)
        return end

    def _advance(self, until: float) -> None:
        """Whatever is due before or at `until`."""
        while True:
            step_at = self._steps[0].done_at if self._steps else inf
            leave_at = self._patience[0][0] if self._patience else inf
            if min(step_at, leave_at) > until or step_at == leave_at == inf:
                return
            if step_at <= leave_at:
                self._complete(self._steps.popleft())
            else:
                now, _, sequence = heappop(self._patience)
                self._leave(sequence, now)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        self._recorder.offered(arrival)
        self._clients.sent(arrival)
        if arrival.most_tokens > self._max_model_len:
            self._recorder.refused(arrival, "TooLong")
            return
        number = next(self._number)
        sequence = _sequence(number, arrival, now, self._target(arrival.priority_class))
        try:
            self._core.arrive(sequence, now)
        except Refused as refusal:
            self._refused(arrival, refusal, now)
            return
        self._recorder.queued(sequence, arrival)
        if arrival.patience < inf:
            heappush(self._patience, (now + arrival.patience, number, sequence))

    def _refused(self, arrival: Arrival, refusal: Refused, now: float) -> None:
        self._recorder.refused(arrival, type(refusal).__name__)
        again = self._clients.retry(arrival, refusal, now)
        if again is not None:
            heappush(self._due, (again.time, -next(self._number), again))

    def _leave(self, sequence: Sequence, now: float) -> None:
        if self._recorder.waits_for_first_token(sequence):
            self._core.finish(sequence, FinishReason.CANCELLED, now)
            self._recorder.abandoned(sequence, now)
            self._plan(now)

    def _plan(self, now: float) -> None:
        while (batch := self._core.plan(now)) is not None:
            self._note_preempted(now, self._core.scheduler.in_flight[-1].admitted)
            self._submit(batch, now)
            self._note_preempted(now)
        self._note_preempted(now)
        for sequence in self._core.take_ended():
            if sequence.finish_reason is FinishReason.EXPIRED:
                self._recorder.expired(sequence, now)
            else:
                self._recorder.evicted(sequence, now)

    def _note_preempted(self, now: float, back: Collection[Sequence] = ()) -> None:
        """Those that wait again, and those that the same plan has seated again, `back`."""
        for sequence in self._core.scheduler.preempted:
            if sequence.status in (Status.PREEMPTED, Status.WAITING) or sequence in back:
                self._recorder.preempted(sequence, now)

    def _submit(self, batch: Batch, now: float) -> None:
        flight = self._core.scheduler.in_flight[-1]
        elapsed = self._device.seconds(work_of(flight))
        self._done_at = max(self._done_at, now) + elapsed
        for sequence in flight.admitted:
            self._note_end(sequence)
        self._steps.append(_Step(self._done_at, elapsed, batch, self._recorder.planned(flight, now)))

    def _note_end(self, sequence: Sequence) -> None:
        """An answer that is shorter than it declared ends with an end token, which the device samples."""
        if sequence.end_tokens:
            self._ends[sequence.slot] = len(sequence.prompt) + sequence.seed
        else:
            self._ends.pop(sequence.slot, None)

    def _complete(self, step: _Step) -> None:
        batch = step.batch
        tokens = [TOKEN] * len(batch.sampled)
        if self._ends:
            for index, row in enumerate(batch.sampled):
                if self._ends.get(batch.slots[row]) == batch.starts[row] + batch.lengths[row] + 1:
                    tokens[index] = END
        deltas = self._core.complete(StepOutput(batch.step, tokens, step.elapsed), step.done_at)
        self._recorder.completed(step.works, step.elapsed, deltas, step.done_at)
        self._plan(step.done_at)


def _sequence(number: int, arrival: Arrival, now: float, target: Target) -> Sequence:
    """A prompt without content. Its seed is the length of its answer, which only the device looks at."""
    declared = max(arrival.max_tokens, arrival.output_tokens)
    ends = _AT_END if declared > arrival.output_tokens else _NEVER
    prompt = [0] * arrival.prompt_tokens
    return Sequence(
        str(number),
        arrival.tenant,
        prompt,
        _SAMPLING,
        declared,
        arrival.output_tokens,
        ends,
        priority_class=arrival.priority_class,
        token_interval=target.interval,
        first_token_target=target.first_token,
        first_token_by=min(deadlines) if (deadlines := _deadlines(arrival, now, target)) else None,
        done_by=None if arrival.done_within is None else now + arrival.done_within,
    )


def _deadlines(arrival: Arrival, now: float, target: Target) -> list[float]:
    own = target.first_token if target.refuses else None
    return [now + seconds for seconds in (arrival.deadline, own) if seconds is not None]
