"""One device of a pool, under a core of its own: it takes requests one by one, and reports the times of their
tokens.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from admission.core import Overload
from admission.promise import Promise
from admission.step_times.step_time import StepWork
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.recorder import AttemptOutcome, Objective, PlannedWork, Recorder, TrackedRequest


class AnswerTimes(NamedTuple):
    """The times of a request's first and last token, in seconds of the run; None without one."""

    first: float | None
    last: float | None


REFUSED = AnswerTimes(None, None)
Told = Callable[[int, float], object]
"""Called with a request's number and the time in seconds."""


class _AnswerRecorder(Recorder):
    """Keeps the times of each request's answer, by its session's number, and the running ones."""

    def __init__(self, device: Device, policy: SimulatedPolicy, admitted: Told | None, began: Told | None) -> None:
        """`admitted` is called when a request gets memory, `began` with the first token of a longer answer."""
        super().__init__(device, Objective(inf, inf), policy.weights)
        self.answers: dict[int, AnswerTimes] = {}
        self.under_way: dict[int, Sequence] = {}
        self.without_memory: list[int] = []  # preempted since `take_lost`
        self._admitted, self._began = admitted, began

    def queued(self, sequence: Sequence, arrival: Arrival, promise: Promise) -> None:
        super().queued(sequence, arrival, promise)
        self.under_way[arrival.session] = sequence

    def planned(self, scheduled: ScheduledStep, now: float) -> PlannedWork:
        if self._admitted is not None:
            for sequence in scheduled.admitted:
                if sequence.is_newcomer:
                    self._admitted(self._tracked[sequence].arrival.session, now)
        return super().planned(scheduled, now)

    def preempted(self, sequence: Sequence, now: float) -> None:
        self.without_memory.append(self._tracked[sequence].arrival.session)
        super().preempted(sequence, now)

    def withdrawn(self, sequence: Sequence, now: float) -> None:
        del self.under_way[self._tracked[sequence].arrival.session]
        super().withdrawn(sequence, now)

    def _take(self, new_tokens: abc.Sequence[NewToken], now: float) -> None:
        super()._take(new_tokens, now)
        if self._began is not None:
            for sequence, _, reason in new_tokens:
                if reason is None and len(sequence.output) == 1:
                    self._began(self._tracked[sequence].arrival.session, now)

    def _done(self, sequence: Sequence, request: TrackedRequest, now: float) -> None:
        self.answers[request.arrival.session] = AnswerTimes(request.first_token, now)
        super()._done(sequence, request, now)

    def _note(self, arrival: Arrival, outcome: AttemptOutcome) -> None:
        self.answers.setdefault(arrival.session, REFUSED)
        self.under_way.pop(arrival.session, None)
        super()._note(arrival, outcome)


class _HalfLoop(Loop):
    """Computes each request's first token, and then keeps its memory until it is told to go on or to end."""

    def go_on(self, sequence: Sequence, now: float) -> None:
        self._core.raise_token_limit(sequence, sequence.request.most_tokens - sequence.token_limit, now)
        self._plan(now)

    def cancel(self, sequence: Sequence, now: float) -> None:
        self._core.finish_sequence(sequence, FinishReason.CANCELLED, now)
        self._recorder.withdrawn(sequence, now)
        self._ended(sequence)
        self._plan(now)

    def _queue(self, prompt: Arrival, tokens: int, now: float) -> Sequence:
        return super()._queue(prompt, min(tokens, 1), now)


class _DecodeLoop(_HalfLoop):
    """Takes prompts computed by another device.

    The row that would compute a prompt allocates its memory, in no time, and its token is the known one. A preempted
    sequence has lost the transferred memory, and recomputes its prompt.
    """

    def _seconds(self, scheduled: ScheduledStep) -> float:
        batch, work = scheduled.batch, StepWork(0, scheduled.batch.num_decodes, scheduled.decode_context)
        for row in range(batch.num_decodes, len(batch.slots)):
            if not scheduled.sequences[row].is_newcomer:
                work = work.with_prefill(batch.starts[row], batch.lengths[row])
        return self._device.seconds(work) if work.decode_tokens or work.prefill_tokens else 0.0


class Replica:
    """A device that serves whole requests."""

    def __init__(self, policy: SimulatedPolicy, device: Device) -> None:
        self.core = policy.make_core()
        self._recorder = _AnswerRecorder(device, policy, None, None)
        longest = policy.engine.max_model_len
        self._loop = Loop(self.core, device, self._recorder, longest, target=policy.target)

    @property
    def answers(self) -> dict[int, AnswerTimes]:
        """The times of answers, by the numbers of their sessions."""
        return self._recorder.answers

    @property
    def num_unfinished(self) -> int:
        return len(self._recorder.under_way)

    @property
    def tokens_to_prefill(self) -> int:
        """The prompt tokens of queued and running requests, and of the steps in flight."""
        scheduler = self.core.scheduler
        running = sum(sequence.num_uncomputed_tokens for sequence in scheduler.running.values())
        return running + self.core.backlog.total.tokens + sum(step.num_tokens for step in scheduler.in_flight)

    @property
    def busy(self) -> float:
        """The seconds in which the device was busy."""
        return self._recorder.busy

    @property
    def output_tokens(self) -> int:
        """The output tokens of its steps."""
        return self.core.scheduler.counters.generation_tokens

    @property
    def next_at(self) -> float:
        """The time of its next event; inf: none."""
        return self._loop.next_at

    def give(self, arrival: Arrival) -> None:
        """Add a request that arrives now, not before the time of the last advance."""
        self._loop.expect([arrival])
        self._loop.advance(arrival.time)

    def advance(self, now: float) -> None:
        self._loop.advance(now)

    def end(self) -> float:
        """The end of the last step, in seconds."""
        return self._loop.end()


class HalfReplica(Replica):
    """A device of one of two pools: a request keeps its memory after its first token, until it is told to go on or is
    cancelled.
    """

    def __init__(
        self,
        policy: SimulatedPolicy,
        device: Device,
        admitted: Told | None = None,
        began: Told | None = None,
        loop: type[_HalfLoop] = _HalfLoop,
    ) -> None:
        self.core = policy.make_core()
        self._recorder = _AnswerRecorder(device, policy, admitted, began)
        self._half = loop(self.core, device, self._recorder, policy.engine.max_model_len, target=policy.target)
        self._loop = self._half

    def go_on(self, number: int, now: float) -> None:
        """Resume a request from now on, unless its core has ended it."""
        sequence = self._recorder.under_way.get(number)
        if sequence is not None:
            self._half.go_on(sequence, now)

    def take_lost(self) -> list[int]:
        """The sequences preempted since the last call, whose memory is taken."""
        lost, self._recorder.without_memory = self._recorder.without_memory, []
        return lost

    def cancel(self, number: int, now: float) -> bool:
        """End a queued or running request, and free its memory; returns False without one."""
        sequence = self._recorder.under_way.get(number)
        if sequence is not None:
            self._half.cancel(sequence, now)
        return sequence is not None


def decode_replica(policy: SimulatedPolicy, device: Device, admitted: Told) -> HalfReplica:
    """Makes a decode device behind prefill devices: it refuses no request, and gives memory to requests that its core
    expects to fit, in the order of complete prompts.
    """
    engine = policy.engine
    whole = replace(
        engine,
        prefill_chunk=None,
        max_num_batched_tokens=engine.max_num_seqs * engine.max_model_len,
        prefix_cache=False,
    )
    core = replace(policy.core, order="fcfs", overload=Overload.UNBOUNDED, max_waiting=None, calibration=False)
    return HalfReplica(replace(policy, core=core, engine=whole, targets=()), device, admitted, loop=_DecodeLoop)
