"""How evenly tenants that wanted more were served lately, for their weights."""

from collections import deque
from collections.abc import Callable, Mapping, Set

WINDOW = 10  # ticks, of a second each


def jain_index(shares: list[float]) -> float:
    """1 when all are equal, 1/n when one of n has all (Jain, Chiu and Hawe, 1984); 1 where nothing is shared."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0


class FairShares:
    """Compares those that had work waiting at every tick of the window: the others got what they asked for."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._ticks: deque[tuple[Mapping[str, float], Set[str]]] = deque(maxlen=WINDOW + 1)

    def tick(self, service: Mapping[str, float], waiting: Set[str]) -> None:
        """What each tenant was served since the start, and who has work waiting now."""
        self._ticks.append((service, waiting))

    @property
    def index(self) -> float:
        if len(self._ticks) <= WINDOW:
            return 1.0
        rivals = set.intersection(*(set(waiting) for _, waiting in self._ticks))
        before, after = self._ticks[0][0], self._ticks[-1][0]
        served = [(after.get(name, 0.0) - before.get(name, 0.0)) / self._weight(name) for name in rivals]
        return jain_index(served) if len(served) > 1 else 1.0
