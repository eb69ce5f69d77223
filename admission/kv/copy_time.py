"""Predicts what copies of KV blocks add to the time of a step."""

from admission.step_times.step_time import Pipeline
from backend.config import EngineConfig


class CopyTime:
    """Copies that run ahead begin when their step is planned, behind those of the steps before it, and the step waits
    for what is left of them when the steps before it are done. Where nothing runs ahead, they make up part of the step.
    """

    def __init__(self, config: EngineConfig, pipeline: Pipeline) -> None:
        self._each = config.block_copy_seconds
        self._runs_ahead = config.copies_run_ahead
        self._pipeline = pipeline
        self._now = self._done_at = 0.0  # of this plan, and when the copies of those before will be done
        self._ahead = 0.0  # seconds of this plan's copies that are over when its step could begin

    def at(self, now: float) -> None:
        """Note the time of the plan that begins."""
        if self._runs_ahead:
            self._now = now
            self._ahead = self._pipeline.remaining(now) - max(0.0, self._done_at - now)

    def seconds(self, copies: float) -> float:
        """Returns what so many copies add to the step that is being planned."""
        return max(0.0, copies * self._each - self._ahead) if copies else 0.0

    def planned(self, copies: int) -> float:
        """Take these for the copies of the step that was planned; returns what they add to it."""
        added = self.seconds(copies)
        if copies and self._runs_ahead:
            self._done_at = max(self._now, self._done_at) + copies * self._each
        return added

    def lost(self) -> None:
        """Forget the copies of all steps in flight, which were not made or are over."""
        self._done_at = 0.0
