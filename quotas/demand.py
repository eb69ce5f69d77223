"""What requests of one kind have asked for lately. Pure: times are told."""

from collections.abc import Callable

from quotas.reservation import Ask

NOTHING_ASKED = Ask(0)
SHORTEST = 0.5  # seconds that a rate of demand is told from


class Demand:
    """Of the present period and the one before it."""

    def __init__(self, period: float, now: float) -> None:
        """`period` in seconds."""
        self._period = period
        self._asked = self._asked_before = NOTHING_ASKED
        self._largest = self._largest_before = NOTHING_ASKED
        self._turned = self._turned_before = now

    def add(self, ask: Ask) -> None:
        self._asked = _by(int.__add__, self._asked, ask)
        self._largest = _by(max, self._largest, ask)

    def turn(self, now: float) -> None:
        """Begin a new period, if it is time to."""
        if now < self._turned + self._period:
            return
        self._asked_before, self._asked = self._asked, NOTHING_ASKED
        self._largest_before, self._largest = self._largest, NOTHING_ASKED
        self._turned_before, self._turned = self._turned, now

    @property
    def largest(self) -> Ask:
        """The most of each that one request asked for; nothing, when none came."""
        return _by(max, self._largest, self._largest_before)

    @property
    def is_none(self) -> bool:
        return self.largest == NOTHING_ASKED

    def within(self, seconds: float, now: float) -> Ask:
        """What would come in a time, if it goes on so; no less than the largest request."""
        ratio = seconds / max(now - self._turned_before, SHORTEST)
        asked = _by(int.__add__, self._asked, self._asked_before)
        return _by(max, self.largest, _by(lambda count, _: round(count * ratio), asked, asked))


def _by(combined: Callable[[int, int], int], one: Ask, other: Ask) -> Ask:
    return Ask(
        combined(one.requests, other.requests),
        combined(one.input_tokens, other.input_tokens),
        combined(one.output_tokens, other.output_tokens),
    )
