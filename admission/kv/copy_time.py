"""Predicts the seconds that copies of KV blocks add to a step."""

from admission.step_times.step_time import Pipeline
from backend.config import EngineConfig


class CopyTime:
    """Copies that run ahead begin when their step is planned, behind the copies of earlier steps, and the step waits
    for their rest when the earlier steps are done. Copies that do not run ahead are part of the step.
    """

    def __init__(self, config: EngineConfig, pipeline: Pipeline) -> None:
        self._each = config.block_copy_seconds
        self._runs_ahead = config.copies_run_ahead
        self._pipeline = pipeline
        self._now = self._done_at = 0.0  # the time of this plan, and the end of earlier plans' copies
        self._ahead = 0.0  # seconds of this plan's copies that overlap with steps in flight

    def at(self, now: float) -> None:
        if self._runs_ahead:
            self._now = now
            self._ahead = self._pipeline.remaining(now) - max(0.0, self._done_at - now)

    def seconds(self, copies: float) -> float:
        """Return the seconds that `copies` copies add to the step being planned."""
        return max(0.0, copies * self._each - self._ahead) if copies else 0.0

    def planned(self, copies: int) -> float:
        """Account for the copies of the planned step; returns the seconds that they add."""
        added = self.seconds(copies)
        if copies and self._runs_ahead:
            self._done_at = max(self._now, self._done_at) + copies * self._each
        return added

    def lost(self) -> None:
        """Forget the copies of all steps in flight."""
        self._done_at = 0.0
