"""One device of a pool, under a core of its own: it is given requests one by one, and says when their tokens came."""

from dataclasses import replace
from math import inf
from typing import NamedTuple

from admission.core import Overload
from admission.simulation.arrival import Arrival
from admission.simulation.device import Device
from admission.simulation.loop import Loop
from admission.simulation.policy import SimulatedPolicy
from admission.simulation.recorder import AttemptOutcome, Objective, Recorder, TrackedRequest
from admission.step_times.step_time import StepWork, prefill_pairs
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence


class Answer(NamedTuple):
    """When the first and the last token of a request came, in seconds of the run; None: it has none."""

    first: float | None
    last: float | None


REFUSED = Answer(None, None)


class _AnswerRecorder(Recorder):
    """Keeps when each request was answered, by its session's number."""

    def __init__(self, device: Device, policy: SimulatedPolicy) -> None:
        super().__init__(device, Objective(inf, inf), policy.weights)
        self.answers: dict[int, Answer] = {}

    def _done(self, sequence: Sequence, request: TrackedRequest, now: float) -> None:
        self.answers[request.arrival.session] = Answer(request.first_token, now)
        super()._done(sequence, request, now)

    def _note(self, arrival: Arrival, outcome: AttemptOutcome) -> None:
        self.answers.setdefault(arrival.session, REFUSED)
        super()._note(arrival, outcome)


class _DecodeLoop(Loop):
    """Takes prompts whose keys and values have come over the link: the first row of each is a decode like any other.

    One that was preempted has lost them, and computes its prompt again.
    """

    def _seconds(self, scheduled: ScheduledStep) -> float:
        batch = scheduled.batch
        tokens = begun = pairs = 0
        decodes, context = batch.num_decodes, scheduled.decode_context
        for row in range(batch.num_decodes, len(batch.slots)):
            start, length = batch.starts[row], batch.lengths[row]
            if scheduled.sequences[row].num_preemptions:
                tokens, begun, pairs = tokens + length, begun + start, pairs + prefill_pairs(start, length)
            else:
                decodes, context = decodes + 1, context + start + length
        return self._device.seconds(StepWork(tokens, decodes, context, begun, pairs))


class Replica:
    """A device that serves all of a request."""

    def __init__(self, policy: SimulatedPolicy, device: Device, loop: type[Loop] = Loop) -> None:
        self.core = policy.make_core()
        self._recorder = _AnswerRecorder(device, policy)
        self._loop = loop(self.core, device, self._recorder, policy.engine.max_model_len, target=policy.target)
        self.num_given = 0

    @property
    def answers(self) -> dict[int, Answer]:
        """When requests were answered, by the numbers of their sessions."""
        return self._recorder.answers

    @property
    def num_unfinished(self) -> int:
        return self.num_given - len(self._recorder.answers)

    @property
    def tokens_to_prefill(self) -> int:
        """The tokens of prompts that wait or run, and of the steps in flight."""
        scheduler = self.core.scheduler
        running = sum(sequence.num_uncomputed_tokens for sequence in scheduler.running.values())
        return running + self.core.backlog.total.tokens + sum(step.num_tokens for step in scheduler.in_flight)

    @property
    def busy(self) -> float:
        """The seconds in which it computed."""
        return self._recorder.busy

    def give(self, arrival: Arrival) -> None:
        """Let a request arrive, not before the time to which it has been advanced."""
        self.num_given += 1
        self._loop.expect([arrival])

    def advance(self, now: float) -> None:
        self._loop.advance(now)

    def end(self) -> float:
        """Serve all that it was given; returns when the last step ended, in seconds."""
        self._loop.advance(inf)
        return self._loop.end()


def decode_replica(policy: SimulatedPolicy, device: Device) -> Replica:
    """Makes a device that goes on where another has computed the prompt: it refuses nobody, and a request joins as soon
    as there is memory for it, whatever it has of tokens.
    """
    engine = policy.engine
    whole = replace(
        engine,
        prefill_chunk=None,
        max_num_batched_tokens=engine.max_num_seqs * engine.max_model_len,
        prefix_cache=False,
    )
    core = replace(policy.core, overload=Overload.UNBOUNDED, max_waiting=None, calibration=False)
    return Replica(replace(policy, core=core, engine=whole, targets=()), device, _DecodeLoop)
