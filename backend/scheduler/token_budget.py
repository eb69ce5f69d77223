"""A step's token budget bounds its tokens in all, and what decodes leave of it is a budget of prefill.

The first is what is configured, or less for a while after the device had no memory for a step.
"""

from typing import Protocol

RECOVERY = 1024  # steps in which a budget that was next to nothing is whole again
MOST_LOSSES = 16  # in a row, which take any budget down to one token and leave some to wait for memory


class TokenBudget:
    """Halved by a step that is lost, raised a little by each that is computed.

    Additive increase with multiplicative decrease finds what fits without being told (Chiu and Jain, 1989): how much
    memory a step takes depends on its shape, and on what else uses the device.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most  # that a step may have, at least one
        self._most = most
        self._size = float(most)
        self._losses = 0  # in a row
        self.is_cut = False  # whether a step that was lost still tells

    def computed(self) -> None:
        """Raise the budget: a step was computed."""
        self._losses = 0
        self._resize(min(self._size + self._most / RECOVERY, float(self._most)))
        self.is_cut = self._size < self._most

    def lost(self, tokens: int) -> bool:
        """Halve the budget: a step of so many tokens was lost. Returns False when that has gone on for too long."""
        self._losses += 1
        self.is_cut = True
        self._resize(max(1.0, min(self.tokens, tokens) / 2))
        return self._losses <= MOST_LOSSES

    def restore(self) -> bool:
        """Make the budget whole, because nothing fits what is left of it. Returns True if it was less."""
        was_less = self._size < self._most
        self._resize(float(self._most))
        return was_less

    def _resize(self, size: float) -> None:
        self._size, self.tokens = size, int(size)


class PrefillBudget(Protocol):
    """The prefill that a step may still take."""

    def fits(self, start: int, length: int) -> int:
        """Return how many of `length` tokens behind `start` computed ones the step can carry."""
        ...

    def take(self, start: int, length: int) -> None:
        """Spend the budget on `length` tokens behind `start` computed ones."""
        ...


class FixedPrefillBudget:
    """A budget of so many tokens, whatever they attend to."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def fits(self, start: int, length: int) -> int:
        return max(0, min(length, self._tokens))

    def take(self, start: int, length: int) -> None:
        self._tokens -= length
