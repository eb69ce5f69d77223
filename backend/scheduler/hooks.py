"""The choices that the scheduler leaves to whoever knows about tenants, classes and time."""

from collections.abc import Iterable
from typing import Protocol

from backend.config import EngineConfig
from backend.scheduler.sequence import Sequence


class PrefillRoom(Protocol):
    """What is left of a step for prefill."""

    def fits(self, start: int, length: int) -> int:
        """Of `length` tokens behind `start` computed ones, how many the step can carry."""
        ...

    def take(self, start: int, length: int) -> None:
        """It carries these."""
        ...


class TokenRoom:
    """A number of tokens, whatever they attend to."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def fits(self, start: int, length: int) -> int:
        return max(0, min(length, self._tokens))

    def take(self, start: int, length: int) -> None:
        self._tokens -= length


class SchedulerHooks(Protocol):
    """Asked while a step is planned; answers at once."""

    def prefill_room(self, num_decodes: int, decode_context: int, interval: float | None, tokens: int) -> PrefillRoom:
        """For a step with these decodes over `decode_context` tokens in all, and at most `tokens` of prefill.

        `interval` is the tightest time between tokens promised to any of them, in seconds.
        """
        ...

    def admits(self, sequence: Sequence, running: Iterable[Sequence], num_free: int) -> bool:
        """Whether `num_free` blocks suffice for it to join those running that would not give way to it. The scheduler
        has made sure that its tokens fit now; the question is what all of them may still need.
        """
        ...

    def peak(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that these may come to hold together at the fullest moment."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """It has just joined, perhaps once more after a preemption; whoever is head next may depend on it."""
        ...

    def victim_rank(self, sequence: Sequence) -> tuple[float, ...]:
        """The largest is preempted first, among those of the lowest class."""
        ...


class DefaultHooks:
    """No promises, no tenants: prefill fills the step, a free block for everyone who runs, the youngest goes first."""

    def __init__(self, config: EngineConfig) -> None:
        self._blocks_for = config.blocks_for

    def prefill_room(self, num_decodes: int, decode_context: int, interval: float | None, tokens: int) -> PrefillRoom:
        return TokenRoom(tokens)

    def admits(self, sequence: Sequence, running: Iterable[Sequence], num_free: int) -> bool:
        return True

    def peak(self, sequences: Iterable[Sequence]) -> int:
        return sum(self._blocks_for(sequence.num_tokens) + 1 for sequence in sequences)

    def admitted(self, sequence: Sequence) -> None:
        pass

    def victim_rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.arrival,)
