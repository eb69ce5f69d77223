"""Who had how much of the engine, and how much of it lately."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from backend.sequence import Sequence

WINDOW = 60  # ticks, of a second each
_NOTHING = 1e-12  # what rounding leaves of a sum


class Charges:
    """What tenants were charged, for orderings that keep no account of it. O(running) a look."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}  # in the unit of account
        self._seen: dict[Sequence, float] = {}  # when last looked at, of those that have not ended

    def look(self, running: Iterable[Sequence]) -> None:
        for sequence in running:
            self._count(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._count(sequence)
        self._seen.pop(sequence, None)

    def _count(self, sequence: Sequence) -> None:
        spent = sequence.charged - self._seen.get(sequence, 0.0)
        if spent:
            self._seen[sequence] = sequence.charged
            self.total[sequence.tenant] = self.total.get(sequence.tenant, 0.0) + spent


class Shares:
    """Service by tenant, in the unit of account: since the start, and over the last minute."""

    def __init__(self) -> None:
        self.total: Mapping[str, float] = {}
        self._recent: Counter[str] = Counter()
        self._recent_of_all = 0.0
        self._ticks: deque[dict[str, float]] = deque()

    def tick(self, total: Mapping[str, float]) -> None:
        """`total` since the start; it is kept."""
        before, self.total = self.total, total
        grown = {name: more for name, spent in total.items() if (more := spent - before.get(name, 0.0))}
        self._add(grown, 1)
        self._ticks.append(grown)
        if len(self._ticks) > WINDOW:
            self._add(self._ticks.popleft(), -1)
        self._recent_of_all = sum(self._recent.values())

    def _add(self, service: Mapping[str, float], sign: int) -> None:
        for name, spent in service.items():
            self._recent[name] += sign * spent  # type: ignore[assignment]  # a counter of floats
            if abs(self._recent[name]) < _NOTHING:
                del self._recent[name]

    def share(self, tenant: str) -> float:
        """Of all service in the last minute, 0 to 1."""
        everyone = self._recent_of_all
        return min(max(self._recent[tenant] / everyone, 0.0), 1.0) if everyone > 0 else 0.0
