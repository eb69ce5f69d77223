"""The step loop takes an engine's step from its plan to its tokens; the server and the offline `LLM` share it."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from backend.errors import MemoryExhausted
from backend.scheduler.batch import NO_TOKEN, NO_TOKEN_ALLOWED, Batch, StepOutput
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence

log = logging.getLogger(__name__)


class Core(Protocol):
    """The core decides what each step computes: a scheduler, alone or under a controller.

    It is synchronous and pure: each call carries its time, in seconds of the engine's clock.
    """

    @property
    def in_flight(self) -> deque[ScheduledStep]:
        """The steps that are planned and not yet accounted for, the oldest first."""
        ...

    @property
    def wakes_at(self) -> float | None:
        """The time at which to plan again without an event, if no step is in flight by then."""
        ...

    def schedule(self, now: float) -> Batch | None:
        """Plan the next step; None when there is nothing to compute, or the most steps are in flight."""
        ...

    def update_from_output(self, output: StepOutput, now: float) -> list[NewToken]:
        """Account for the oldest step in flight; returns its tokens."""
        ...

    def rollback(self, now: float) -> bool:
        """Undo the oldest step in flight, for which the device had no memory, and those behind it, as if never planned.

        Returns False when nothing less can be planned in their place.
        """
        ...

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence in any state; on an ended sequence nothing happens."""
        ...


class StepLoop:
    """Runs schedule, launch, wait, update and deliver over one core and one device.

    Steps are launched ahead, so the cycle is in two halves: `schedule` launches, and `step` takes the device's output
    of the oldest step, after the wait for it.
    """

    def __init__(self, core: Core, launch: Callable[[Batch], object], clock: Callable[[], float]) -> None:
        """`launch` queues a step at the device and does not wait for it; `clock` is the engine's, in seconds."""
        self._core = core
        self._launch = launch
        self._clock = clock

    def schedule(self) -> None:
        """Plan steps and launch them, until the most are in flight or there is nothing to compute."""
        now, began = self._clock(), time.perf_counter()
        while (batch := self._core.schedule(now)) is not None:
            self._core.in_flight[-1].planning = time.perf_counter() - began
            self._launch(batch)
            began = time.perf_counter()

    def seconds_to_wake(self) -> float | None:
        """Return the seconds until the next `schedule`; None if a step in flight will cause it, or nothing needs it."""
        wakes_at = self._core.wakes_at
        return None if wakes_at is None or self._core.in_flight else max(0.0, wakes_at - self._clock())

    def step(self, output: StepOutput | MemoryExhausted) -> list[NewToken]:
        """Account for the oldest step in flight and launch what may follow it; returns the tokens to be delivered.

        A step for which the device had no memory has no tokens, and smaller steps are launched in its place. Raises the
        `MemoryExhausted` when no step is smaller. A sequence for which the model computed no numbers has ended as
        `FAILED`, and a sequence whose grammar allows no token as `GRAMMAR`.
        """
        if isinstance(output, MemoryExhausted):
            new_tokens = self._roll_back(output)
        else:
            new_tokens = self._core.update_from_output(output, self._clock())
            if NO_TOKEN in output.token_ids or NO_TOKEN_ALLOWED in output.token_ids:
                new_tokens = [self._checked(new_token) for new_token in new_tokens]
        self.schedule()  # before anything is delivered: the device does not wait for clients
        return new_tokens

    def _roll_back(self, error: MemoryExhausted) -> list[NewToken]:
        if not self._core.rollback(self._clock()):
            raise error
        log.warning("a step is planned again with less: %s", error)
        return []

    def _checked(self, new_token: NewToken) -> NewToken:
        """End a sequence for which there is no token; the others in the batch go on."""
        sequence, token_id, _ = new_token
        if token_id >= 0:
            return new_token
        reason = FinishReason.GRAMMAR
        if token_id == NO_TOKEN:
            reason = FinishReason.FAILED
            log.error("the model computed no numbers for %s: its weights or its dtype are at fault", sequence.id)
        self._core.finish_sequence(sequence, reason, self._clock())
        return sequence, token_id, reason
