"""Retention between turns: a conversation's blocks stay cached by the forecast return of its next turn.

The next turn finds an answer's last full block again: the time between the two is a gap. Gaps of tools and of people
have no form in common (a fast tool and a slow one make two humps), so their distribution is measured: the life-table
estimate of survival (Kaplan and Meier, 1958; Cutler and Ederer, 1958) over a tenant's last turns, in which a turn still
away counts for its age. Turns with a client's hint are separate from turns without, and are measured as gap over hinted
gap, as long as that ratio is the more predictable: a hint wrong by a constant factor is as good as a right one, and a
hint without information is ignored.

A block's worth is the index of Gittins (1979): the largest ratio, over all times until which it might be kept, of the
chance of a reuse by then to the expected time of keeping. Of blocks whose return is known to the second, the last to
return has the least worth, which is Belady's rule; blocks that return at any time with the same chance have equal
worth.
"""

from bisect import bisect_right
from collections import deque
from enum import StrEnum
from itertools import accumulate, repeat
from math import sqrt
from operator import mul

from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import COMMON_CHAIN, PLAIN_CHAIN, WANTED_CHAIN, IdleChain

MIN_RETURN_S = 1.0  # the least time until a return, for the worth of a block
AWAITED_WORTH = 1e6  # above the worth of every block that may not come back
TURNS_REMEMBERED = 256  # of each kind
PRIOR_WEIGHT_TURNS = 4.0  # the weight of a curve's prior, in turns
TURNS_PER_REDRAW = 16  # departures and returns, after which a curve is drawn again
HINT_SCALE_S = 16.0  # the place in the grid of a gap as long as hinted
MIN_RETURNED_TURNS = 8  # before hints are judged

GAP_EDGES_S = list(accumulate(repeat(sqrt(2.0), 26), mul, initial=0.5))
"""The grid of gaps: the upper ends of its cells, 0.5 to 4,096 seconds. A longer gap counts as no return."""
NUM_GAP_CELLS = len(GAP_EDGES_S)


class AwaitedTurn:
    """A turn that may come, after its predecessor has ended."""

    __slots__ = ("cells", "chain", "expects", "is_back", "last", "left_at", "log")

    def __init__(self, log: "_TurnLog", last: BlockName, chain: IdleChain) -> None:
        self.log = log
        self.last = last
        self.chain: IdleChain | None = chain  # the chain of its predecessor, until it is back
        self.expects = chain.expects
        self.left_at = chain.left_at
        self.is_back = False
        self.cells = (0, 0)  # of its gap, and of gap over hinted gap; once it is back

    def came(self, now: float) -> None:
        gap = now - self.left_at
        over = gap if self.expects is None else gap / self.expects * HINT_SCALE_S
        self.cells = (bisect_right(GAP_EDGES_S, gap), bisect_right(GAP_EDGES_S, over))
        self.is_back = True
        self.chain = None


class SurvivalCurve:
    """The survival of one kind of turns, and the worth of keeping their blocks by age."""

    def __init__(self, prior: list[float]) -> None:
        """`prior`: the share of turns that return in each cell, before any is measured."""
        self._prior = prior
        self.survival = [1.0]
        self.worth = [0.0] * (NUM_GAP_CELLS + 1)
        self.draw([0] * NUM_GAP_CELLS, [])

    def draw(self, back: list[int], away: list[int]) -> None:
        """Draw the curve: `back` counts the turns that returned in each cell; `away` has the cells reached by the turns
        still away.
        """
        gone = [0] * (NUM_GAP_CELLS + 1)
        for cell in away:
            gone[cell] += 1
        at_risk, expected, survival = float(sum(back[:NUM_GAP_CELLS]) + len(away)), PRIOR_WEIGHT_TURNS, [1.0]
        for cell in range(NUM_GAP_CELLS):
            died = back[cell] + PRIOR_WEIGHT_TURNS * self._prior[cell]
            exposed = at_risk - gone[cell] / 2 + expected
            survival.append(survival[-1] * (1.0 - min(1.0, died / exposed)) if exposed > 0 else survival[-1])
            at_risk -= back[cell] + gone[cell]
            expected -= PRIOR_WEIGHT_TURNS * self._prior[cell]
        self.survival = survival
        self._draw_worth()

    def _draw_worth(self) -> None:
        """Gittins' index at an age is the steepest line from there to a later point of (time kept, share returned): the
        relevant points lie on the upper hull of the later ones.
        """
        survival, kept = self.survival, [0.0]
        for cell in range(NUM_GAP_CELLS):
            width = GAP_EDGES_S[cell] - (GAP_EDGES_S[cell - 1] if cell else 0.0)
            kept.append(kept[-1] + width * (survival[cell] + survival[cell + 1]) / 2)
        hull, worth = [NUM_GAP_CELLS], [0.0] * (NUM_GAP_CELLS + 1)
        for point in range(NUM_GAP_CELLS - 1, -1, -1):
            while len(hull) > 1 and self._slope(kept, point, hull[-1]) <= self._slope(kept, hull[-1], hull[-2]):
                hull.pop()
            worth[point] = self._slope(kept, point, hull[-1])
            hull.append(point)
        self.worth = worth

    def _slope(self, kept: list[float], start: int, end: int) -> float:
        took = kept[end] - kept[start]
        return (self.survival[start] - self.survival[end]) / took if took > 0 else 0.0

    def probability(self, cell: int) -> float:
        """Return the probability that a turn, away up to this cell, comes back."""
        left = self.survival[cell]
        return (left - self.survival[NUM_GAP_CELLS]) / left if left > 0 else 0.0


class _TurnLog:
    """The last turns of one kind, and the curves of their gaps."""

    def __init__(self, prior: list[float], prior_over: list[float]) -> None:
        self.turns: deque[AwaitedTurn] = deque()
        self._by_gap, self._by_hint = SurvivalCurve(prior), SurvivalCurve(prior_over)
        self._back = ([0] * (NUM_GAP_CELLS + 1), [0] * (NUM_GAP_CELLS + 1))  # returned turns by cell
        self._num_back = self._news = 0
        self._heeds = True  # hints are used

    def left(self, turn: AwaitedTurn) -> AwaitedTurn | None:
        """Note a turn that may come; returns the oldest turn, if it is forgotten in exchange."""
        self._news += 1
        self.turns.append(turn)
        if len(self.turns) <= TURNS_REMEMBERED:
            return None
        oldest = self.turns.popleft()
        if oldest.is_back:
            self._count(oldest, -1)
        return oldest

    def came(self, turn: AwaitedTurn) -> None:
        self._news += 1
        self._count(turn, 1)

    def at(self, expects: float | None, age: float, now: float) -> tuple[SurvivalCurve, int, float]:
        """Return the curve of a turn, the cell that it has reached, and the seconds in a second of the curve."""
        if self._news >= TURNS_PER_REDRAW:
            self._draw(now)
        if expects is None or not self._heeds:
            return self._by_gap, bisect_right(GAP_EDGES_S, age), 1.0
        unit = expects / HINT_SCALE_S
        return self._by_hint, bisect_right(GAP_EDGES_S, age / unit), unit

    def _count(self, turn: AwaitedTurn, number: int) -> None:
        self._num_back += number
        for back, cell in zip(self._back, turn.cells, strict=True):
            back[cell] += number

    def _draw(self, now: float) -> None:
        self._news = 0
        away = [(now - turn.left_at, turn.expects) for turn in self.turns if not turn.is_back]
        by_gap, by_hint = self._back
        self._by_gap.draw(by_gap, [bisect_right(GAP_EDGES_S, age) for age, _ in away])
        over = [bisect_right(GAP_EDGES_S, age / expects * HINT_SCALE_S) for age, expects in away if expects is not None]
        self._by_hint.draw(by_hint, over)
        in_sight = by_hint[1:NUM_GAP_CELLS]  # a gap off the grid was not hinted
        self._heeds = self._num_back < MIN_RETURNED_TURNS or _focus(in_sight) >= _focus(by_gap[:NUM_GAP_CELLS])


def _focus(back: list[int]) -> int:
    """Return how concentrated the turns are on a cell: a sum of squared integers is the same on every machine."""
    return sum(number * number for number in back)


def _spread(shares: dict[int, float]) -> list[float]:
    return [shares.get(cell, 0.0) for cell in range(NUM_GAP_CELLS)]


_HINTED_CELL = bisect_right(GAP_EDGES_S, HINT_SCALE_S)
UNHINTED_PRIOR = _spread({cell: 0.5 * 0.15 * 0.85**cell for cell in range(NUM_GAP_CELLS)})
"""The prior without a hint: half of the turns return, at a rate falling with age."""
HINTED_PRIOR = _spread(
    {_HINTED_CELL + off: share for off, share in enumerate((0.05, 0.1, 0.2, 0.2, 0.15, 0.1), start=-3)}
)
"""The prior with a hint: four in five turns return at about the hinted time."""


class BetweenTurnsRule(StrEnum):
    """The rule by which blocks of a sequence that has ended are kept for its next turn."""

    MEASURED = "measured"  # by the measured return times of the tenant's turns, and its clients' hints
    LRU = "lru"  # least recently used first, without hints: a baseline to measure by


class MeasuredRetention:
    """Measures the return times of turns, by tenant, and evicts first the blocks least likely to be reused soon, within
    each tenant.
    """

    def __init__(self) -> None:
        self._logs: dict[tuple[str, bool], _TurnLog] = {}  # by tenant; True for turns with a hint
        self._awaited: dict[BlockName, AwaitedTurn] = {}
        self._now = 0.0

    def left(self, chain: IdleChain, last: BlockName) -> None:
        """Note that a turn ended with this full block, and left this chain just now.

        Chains of one kind have hinted return times within a factor of the root of 2.
        """
        self._now = chain.left_at
        log = self._log(chain.tenant, chain.expects)
        turn = self._awaited[last] = AwaitedTurn(log, last, chain)
        forgotten = log.left(turn)
        if forgotten is not None and self._awaited.get(forgotten.last) is forgotten:
            del self._awaited[forgotten.last]
        if chain.expects is not None:
            chain.kind = PLAIN_CHAIN + 1 + bisect_right(GAP_EDGES_S, chain.expects)

    def claim_chain(self, names: list[BlockName], now: float) -> IdleChain | None:
        """Note a prompt that begins with these blocks: it is the next turn of the awaited predecessor with the longest
        match, whose chain is returned.
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

    def worth(self, kind: int, chain: IdleChain, age: float) -> float:
        """Return the worth of a chain away for `age`: the chance of a return for each second of waiting.

        The expected reuse of a block shared by several conversations is as far away as its last use. Among sequences
        that wait for their blocks, the first arrival has the highest worth.
        """
        if kind == COMMON_CHAIN:
            return 1.0 / max(age, MIN_RETURN_S)
        if kind == WANTED_CHAIN:
            return AWAITED_WORTH + age
        curve, cell, unit = self._log(chain.tenant, chain.expects).at(chain.expects, age, self._now)
        return curve.worth[cell] / unit

    def probability(self, chain: IdleChain, age: float) -> float:
        """Return the probability that a turn, away for `age` seconds, comes back."""
        if chain.kind == WANTED_CHAIN:
            return 1.0
        curve, cell, _ = self._log(chain.tenant, chain.expects).at(chain.expects, age, self._now)
        return curve.probability(cell)

    def _log(self, tenant: str, expects: float | None) -> _TurnLog:
        key = (tenant, expects is not None)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = _TurnLog(UNHINTED_PRIOR, HINTED_PRIOR)
        return log
