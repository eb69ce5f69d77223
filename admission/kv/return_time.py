"""Forecasts when the next turn of a conversation comes, from when those before it came.

An answer's last full block is found again by the next turn: the time between the two is a gap. Gaps of tools and of
people have no form in common (a fast tool and a slow one make two humps), so their distribution is measured: the
life-table estimate of survival (Kaplan and Meier, 1958; Cutler and Ederer, 1958) over a tenant's last turns, in which
one that has not come back yet counts for as long as it has been away. Turns whose client said when they come back are
apart from those of which nothing was said, and are measured in gaps over what was said, as long as that is the better
known: so a hint that is wrong by the same factor each time is as good as a right one, and one that says nothing is not
heeded.

What keeping a block is worth is the index of Gittins (1979): the largest ratio, over all times until which it might be
kept, of the chance that it is used by then to the time that it is expected to be kept. Of blocks whose return is known
to the second, that which comes back last has the least, which is Belady's rule; of those that come back at any time
with the same chance, all have the same.
"""

from bisect import bisect_right
from collections import deque
from itertools import accumulate, repeat
from math import sqrt
from operator import mul

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import IdleChain

HISTORY = 256  # turns remembered of each kind
PRIOR = 4.0  # turns that what is believed beforehand counts as
AGAIN = 16  # turns that came or went before a curve is drawn anew
SCALE = 16.0  # a gap that is as long as its client said lies in the grid where one of so many seconds does
ENOUGH = 8  # turns that came back before what their clients said is judged

EDGES = list(accumulate(repeat(sqrt(2.0), 26), mul, initial=0.5))
"""The grid of gaps: the upper ends of its cells, 0.5 to 4,096 seconds. What takes longer is taken for never."""
LAST = len(EDGES)


class Awaited:
    """A turn that may come."""

    __slots__ = ("cells", "chain", "expects", "is_back", "last", "left_at", "log")

    def __init__(self, log: "_Log", last: BlockName, chain: IdleChain) -> None:
        self.log = log
        self.last = last
        self.chain: IdleChain | None = chain  # of which it is the next turn, until it is back
        self.expects = chain.expects
        self.left_at = chain.left_at
        self.is_back = False
        self.cells = (0, 0)  # of its gap, and of its gap over what was said; where it is back

    def came(self, now: float) -> None:
        gap = now - self.left_at
        over = gap if self.expects is None else gap / self.expects * SCALE
        self.cells = (bisect_right(EDGES, gap), bisect_right(EDGES, over))
        self.is_back = True
        self.chain = None


class Curve:
    """The survival of one kind of turns, and what keeping them is worth by age."""

    def __init__(self, prior: list[float]) -> None:
        """`prior` has the share of turns that come back in each cell, beforehand."""
        self._prior = prior
        self.survival = [1.0]
        self.worth = [0.0] * (LAST + 1)
        self.draw([0] * LAST, [])

    def draw(self, back: list[int], away: list[int]) -> None:
        """Draw the curve of turns of which so many came back in each cell; others have been away for up to the cells
        of `away`.
        """
        gone = [0] * (LAST + 1)
        for cell in away:
            gone[cell] += 1
        at_risk, expected, survival = float(sum(back[:LAST]) + len(away)), PRIOR, [1.0]
        for cell in range(LAST):
            died = back[cell] + PRIOR * self._prior[cell]
            exposed = at_risk - gone[cell] / 2 + expected
            survival.append(survival[-1] * (1.0 - min(1.0, died / exposed)) if exposed > 0 else survival[-1])
            at_risk -= back[cell] + gone[cell]
            expected -= PRIOR * self._prior[cell]
        self.survival = survival
        self._draw_worth()

    def _draw_worth(self) -> None:
        """Gittins' index at an age is the steepest line from there to a later point of (time kept, share that came):
        those points alone matter that lie on the upper hull of what follows.
        """
        survival, kept = self.survival, [0.0]
        for cell in range(LAST):
            width = EDGES[cell] - (EDGES[cell - 1] if cell else 0.0)
            kept.append(kept[-1] + width * (survival[cell] + survival[cell + 1]) / 2)
        hull, worth = [LAST], [0.0] * (LAST + 1)
        for point in range(LAST - 1, -1, -1):
            while len(hull) > 1 and self._slope(kept, point, hull[-1]) <= self._slope(kept, hull[-1], hull[-2]):
                hull.pop()
            worth[point] = self._slope(kept, point, hull[-1])
            hull.append(point)
        self.worth = worth

    def _slope(self, kept: list[float], start: int, end: int) -> float:
        took = kept[end] - kept[start]
        return (self.survival[start] - self.survival[end]) / took if took > 0 else 0.0

    def probability(self, cell: int) -> float:
        """Return how probable it is that a turn comes back that has been away up to this cell."""
        left = self.survival[cell]
        return (left - self.survival[LAST]) / left if left > 0 else 0.0


class _Log:
    """The last turns of one kind, and the curves of their gaps."""

    def __init__(self, prior: list[float], prior_over: list[float]) -> None:
        self.turns: deque[Awaited] = deque()
        self._by_gap, self._by_hint = Curve(prior), Curve(prior_over)
        self._back = ([0] * (LAST + 1), [0] * (LAST + 1))  # those that came back, by cell
        self._num_back = self._news = 0
        self._heeds = True  # what clients say

    def left(self, turn: Awaited) -> Awaited | None:
        """Note a turn that may come; returns one that is forgotten for it."""
        self._news += 1
        self.turns.append(turn)
        if len(self.turns) <= HISTORY:
            return None
        oldest = self.turns.popleft()
        if oldest.is_back:
            self._count(oldest, -1)
        return oldest

    def came(self, turn: Awaited) -> None:
        self._news += 1
        self._count(turn, 1)

    def at(self, expects: float | None, age: float, now: float) -> tuple[Curve, int, float]:
        """Returns the curve of a turn, the cell that it has reached, and the seconds in a second of the curve."""
        if self._news >= AGAIN:
            self._draw(now)
        if expects is None or not self._heeds:
            return self._by_gap, bisect_right(EDGES, age), 1.0
        unit = expects / SCALE
        return self._by_hint, bisect_right(EDGES, age / unit), unit

    def _count(self, turn: Awaited, number: int) -> None:
        self._num_back += number
        for back, cell in zip(self._back, turn.cells, strict=True):
            back[cell] += number

    def _draw(self, now: float) -> None:
        self._news = 0
        away = [(now - turn.left_at, turn.expects) for turn in self.turns if not turn.is_back]
        by_gap, by_hint = self._back
        self._by_gap.draw(by_gap, [bisect_right(EDGES, age) for age, _ in away])
        over = [bisect_right(EDGES, age / expects * SCALE) for age, expects in away if expects is not None]
        self._by_hint.draw(by_hint, over)
        in_sight = by_hint[1:LAST]  # what is off the grid was not foretold
        self._heeds = self._num_back < ENOUGH or _focus(in_sight) >= _focus(by_gap[:LAST])


def _focus(back: list[int]) -> int:
    """Returns how much turns agree on a cell: the sum of squares, of integers, is the same on every machine."""
    return sum(number * number for number in back)


def _spread(shares: dict[int, float]) -> list[float]:
    return [shares.get(cell, 0.0) for cell in range(LAST)]


_SAID = bisect_right(EDGES, SCALE)
ANY_TIME = _spread({cell: 0.5 * 0.15 * 0.85**cell for cell in range(LAST)})
"""Before anything is known, half come back, and the longer they are away the less they do."""
AS_SAID = _spread({_SAID + off: share for off, share in enumerate((0.05, 0.1, 0.2, 0.2, 0.15, 0.1), start=-3)})
"""Before anything is known, four in five come back about when their clients said."""


class ReturnTimes:
    """What is known of when turns come back, by tenant."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, bool], _Log] = {}  # by tenant, and whether something was said
        self._awaited: dict[BlockName, Awaited] = {}
        self._now = 0.0

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Note that a turn ended with this full block, and left this chain just now."""
        self._now = chain.left_at
        log = self._log(chain.tenant, chain.expects)
        turn = self._awaited[last] = Awaited(log, last, chain)
        forgotten = log.left(turn)
        if forgotten is not None and self._awaited.get(forgotten.last) is forgotten:
            del self._awaited[forgotten.last]

    def arrived(self, names: list[BlockName], now: float) -> IdleChain | None:
        """Note that a prompt came which begins with these blocks: it is the next turn of whatever ended with the last
        of them that is awaited, whose chain is returned.
        """
        self._now = now
        awaited = self._awaited
        for name in reversed(names):
            if name in awaited:
                turn = awaited.pop(name)
                chain = turn.chain
                turn.came(now)
                turn.log.came(turn)
                return chain
        return None

    def worth(self, tenant: str, expects: float | None, age: float) -> float:
        """Returns the chance of a return for each second that a turn is awaited, which has been away for `age`."""
        curve, cell, unit = self._log(tenant, expects).at(expects, age, self._now)
        return curve.worth[cell] / unit

    def probability(self, tenant: str, expects: float | None, age: float) -> float:
        """Returns how probable it is that a turn comes back which has been away for `age` seconds."""
        curve, cell, _ = self._log(tenant, expects).at(expects, age, self._now)
        return curve.probability(cell)

    def _log(self, tenant: str, expects: float | None) -> _Log:
        key = (tenant, expects is not None)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = _Log(ANY_TIME, AS_SAID)
        return log
