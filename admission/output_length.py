"""Output lengths, predicted from earlier answers by tenant and by the client's max_tokens. The controller reports
answers.
"""

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import accumulate
from math import sqrt

LENGTHS_REMEMBERED = 200  # answers of each kind
MIN_LENGTHS_OF_KIND = 8  # before the kind's own lengths are used


class OutputLengths:
    """Empirical distributions of the number of output tokens, conditional on the tokens generated already.

    A kind is a tenant and the power of two of max_tokens. A kind with fewer than `MIN_LENGTHS_OF_KIND` answers uses the
    lengths of all tenants with that power of two; without any, half of max_tokens. Only answers that ended by
    themselves or at their bound count: a cancelled answer says nothing of its length.
    """

    def __init__(self) -> None:
        self._kinds = defaultdict[tuple[str, int], _Lengths](_Lengths)

    def observe(self, tenant: str, max_tokens: int, length: int) -> None:
        for name in (tenant, ""):
            self._kinds[name, max_tokens.bit_length()].add(length)

    def mean(self, tenant: str, max_tokens: int, generated: int = 0) -> float:
        """Return the expected total length, at least `generated` and at most `max_tokens`."""
        return _mean(self._lengths(tenant, max_tokens), max_tokens, generated)

    def knows(self, tenant: str, max_tokens: int) -> bool:
        """Return True if the lengths of any answer of the kind, or of its max_tokens, are known."""
        return self._lengths(tenant, max_tokens) is not None

    def quantile(self, tenant: str, max_tokens: int, share: float, generated: int = 0) -> int:
        """Return the length not exceeded by `share` of the answers longer than `generated` tokens."""
        lengths = self._lengths(tenant, max_tokens)
        value = None if lengths is None else lengths.quantile_above(generated, share)
        return max_tokens if value is None else min(value, max_tokens)

    def quantiles(self, tenant: str, max_tokens: int, shares: Iterable[float], generated: int, least: int) -> list[int]:
        """Return the lengths not exceeded by these shares (ascending, below 1) of the answers longer than `generated`
        tokens, and at least `least`. Beyond the longest known answer every length up to `max_tokens` is equally likely;
        without known answers, the length is `max_tokens`.
        """
        lengths = self._lengths(tenant, max_tokens)
        known = [max_tokens] if lengths is None else lengths.above(generated)
        left, found = max_tokens - generated, []
        for share in shares:
            length = known[int(share * len(known))] if known else generated + 1 + int(share * left)
            found.append(max(least, min(length, max_tokens)))
        return found

    def forecast(self, tenant: str, max_tokens: int, generated: int) -> tuple[float, float]:
        """Return mean and standard deviation of the length; those of a uniform length where no answer is known."""
        lengths = self._lengths(tenant, max_tokens)
        mean = _mean(lengths, max_tokens, generated)
        deviation = (max_tokens - generated) * 12**-0.5 if lengths is None else lengths.deviation()
        return mean, min(deviation, max_tokens - mean)

    def _lengths(self, tenant: str, max_tokens: int) -> "_Lengths | None":
        bound = max_tokens.bit_length()
        own = self._kinds.get((tenant, bound))
        return own if own is not None and own.count >= MIN_LENGTHS_OF_KIND else self._kinds.get(("", bound))


def _mean(lengths: "_Lengths | None", max_tokens: int, generated: int) -> float:
    expected = None if lengths is None else lengths.mean_above(generated)
    if expected is None:
        expected = (generated + max_tokens) / 2
    return min(max(expected, float(generated)), float(max_tokens))


class _Lengths:
    """The last `LENGTHS_REMEMBERED` lengths, in order of arrival and sorted. Adding one is on every request's path."""

    def __init__(self) -> None:
        self.count = 0  # above 0 in use: the object is made for the first length of its kind
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the first n sorted lengths; made on demand
        self._sum = 0
        self._squares = 0

    def add(self, length: int) -> None:
        if len(self._recent) == LENGTHS_REMEMBERED:
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
        return self._sorted[bisect_right(self._sorted, generated) :]

    def quantile_above(self, generated: int, share: float) -> int | None:
        first = bisect_right(self._sorted, generated) if generated else 0
        count = len(self._sorted) - first
        return self._sorted[first + min(int(share * count), count - 1)] if count else None

    def deviation(self) -> float:
        count = len(self._sorted)
        return sqrt(count * self._squares - self._sum * self._sum) / count
