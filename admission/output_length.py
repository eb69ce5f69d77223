"""Predicts the lengths of answers from those of earlier ones, by tenant and by what the client allowed."""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import accumulate
from math import sqrt

HISTORY = 200  # answers remembered of each kind
ENOUGH = 8  # answers before a kind of its own is believed


class OutputLengths:
    """Empirical distributions of the number of output tokens, conditional on what is generated already.

    A kind is a tenant and the power of two that max_tokens falls in. Until a kind has `ENOUGH` answers, those of all
    tenants with that bound speak for it; until there are any, half of max_tokens. Only answers that ended by themselves
    or by their bound count: a cancelled one says nothing of its length.
    """

    def __init__(self) -> None:
        self._kinds = defaultdict[tuple[str, int], _Lengths](_Lengths)

    def observe(self, tenant: str, max_tokens: int, length: int) -> None:
        for name in (tenant, ""):
            self._kinds[name, max_tokens.bit_length()].add(length)

    def mean(self, tenant: str, max_tokens: int, generated: int = 0) -> float:
        """Returns the expected length in all, at least `generated` and at most `max_tokens`."""
        return _mean(self._lengths(tenant, max_tokens), max_tokens, generated)

    def knows(self, tenant: str, max_tokens: int) -> bool:
        """Returns whether any answer of the kind, or of that bound, has shown its length."""
        return self._lengths(tenant, max_tokens) is not None

    def quantile(self, tenant: str, max_tokens: int, share: float, generated: int = 0) -> int:
        """Returns the length that `share` of the answers which got past `generated` tokens did not exceed."""
        lengths = self._lengths(tenant, max_tokens)
        value = None if lengths is None else lengths.quantile_above(generated, share)
        return max_tokens if value is None else min(value, max_tokens)

    def quantiles(self, tenant: str, max_tokens: int, shares: Iterable[float], generated: int, least: int) -> list[int]:
        """Returns the lengths that these shares (ascending, below 1) of the answers which got past `generated` tokens
        did not exceed, and `least` where that is more. Of one that is longer than all that are known, every length up
        to `max_tokens` is as likely; where none is known, it may have all of them.
        """
        lengths = self._lengths(tenant, max_tokens)
        known = [max_tokens] if lengths is None else lengths.above(generated)
        left, found = max_tokens - generated, []
        for share in shares:
            length = known[int(share * len(known))] if known else generated + 1 + int(share * left)
            found.append(max(least, min(length, max_tokens)))
        return found

    def forecast(self, tenant: str, max_tokens: int, generated: int) -> tuple[float, float]:
        """Returns mean and standard deviation of the length; a uniform one's where nothing is known."""
        lengths = self._lengths(tenant, max_tokens)
        mean = _mean(lengths, max_tokens, generated)
        deviation = (max_tokens - generated) * 12**-0.5 if lengths is None else lengths.deviation()
        return mean, min(deviation, max_tokens - mean)

    def _lengths(self, tenant: str, max_tokens: int) -> "_Lengths | None":
        bound = max_tokens.bit_length()
        own = self._kinds.get((tenant, bound))
        return own if own is not None and own.count >= ENOUGH else self._kinds.get(("", bound))


def _mean(lengths: "_Lengths | None", max_tokens: int, generated: int) -> float:
    expected = None if lengths is None else lengths.mean_above(generated)
    if expected is None:
        expected = (generated + max_tokens) / 2
    return min(max(expected, float(generated)), float(max_tokens))


class _Lengths:
    """The last `HISTORY` lengths, in the order they came and sorted. Adding one is on every request's path."""

    def __init__(self) -> None:
        self.count = 0  # above 0 once it is used: one is made for the first length of its kind
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the first n sorted lengths; made when it is asked for
        self._sum = 0
        self._squares = 0

    def add(self, length: int) -> None:
        if len(self._recent) == HISTORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest
            self._squares -= oldest * oldest
        else:
            self.count += 1
        self._recent.append(length)
        insort(self._sorted, length)
        self._sum += length
        self._squares += length * length
        self._sums = []

    def mean_above(self, generated: int) -> float | None:
        if not generated:
            return self._sum / len(self._sorted)
        first = bisect_right(self._sorted, generated)
        count = len(self._sorted) - first
        self._sums = self._sums or list(accumulate(self._sorted, initial=0))
        return (self._sum - self._sums[first]) / count if count else None

    def above(self, generated: int) -> list[int]:
        """Returns those longer than that, sorted."""
        return self._sorted[bisect_right(self._sorted, generated) :]

    def quantile_above(self, generated: int, share: float) -> int | None:
        first = bisect_right(self._sorted, generated) if generated else 0
        count = len(self._sorted) - first
        return self._sorted[first + min(int(share * count), count - 1)] if count else None

    def deviation(self) -> float:
        count = len(self._sorted)
        return sqrt(count * self._squares - self._sum * self._sum) / count
