"""What waits: in all, of each tenant, and of each of its classes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from admission.aging import Aging
from admission.load import Load
from backend.sequence import Sequence

Cost = Callable[[Sequence], float]
"""Seconds of engine time that a whole sequence is predicted to take."""


class _Class:
    """One tenant's waiting sequences of one class, those that came first in front."""

    __slots__ = ("load", "sequences")

    def __init__(self) -> None:
        self.load = Load()
        self.sequences: OrderedDict[Sequence, Load] = OrderedDict()

    @property
    def oldest(self) -> float:
        return next(iter(self.sequences)).arrival

    def overtaken(self, key: float, level: int, aging: Aging) -> int:
        """Tokens of the newest, those that rank behind `key`. O(those that arrived since)."""
        tokens = 0
        for sequence, load in reversed(self.sequences.items()):
            if aging.key(sequence.arrival, level) <= key:
                break
            if aging.key(sequence.arrival - sequence.head_start, level) > key:
                tokens += load.tokens
        return tokens


class TenantBacklog:
    """One tenant's waiting work."""

    __slots__ = ("classes", "load")

    def __init__(self) -> None:
        self.load = Load()
        self.classes: dict[int, _Class] = {}

    def tokens_before(self, arrival: float, head_start: float, priority_class: int, aging: Aging) -> int:
        """Tokens whose turn comes before that of a newcomer: of classes that are as urgent all but what its head start
        overtakes, and of a lower class either nothing or, when its oldest has aged enough, everything.
        """
        key, tokens = aging.key(arrival - head_start, priority_class), 0
        for level, waiting in self.classes.items():
            if level <= priority_class or aging.key(waiting.oldest, level) < key:
                tokens += waiting.load.tokens
                if head_start:
                    tokens -= waiting.overtaken(key, level, aging)
        return tokens


class Backlog:
    """Told of every sequence that begins to wait and that waits no more. O(1) each."""

    def __init__(self, cost: Cost) -> None:
        self.total = Load()
        self._cost = cost
        self._tenants: dict[str, TenantBacklog] = {}
        self._classes: dict[int, Load] = {}  # over all tenants

    def __contains__(self, sequence: Sequence) -> bool:
        tenant = self._tenants.get(sequence.tenant)
        waiting = tenant.classes.get(sequence.priority_class) if tenant else None
        return waiting is not None and sequence in waiting.sequences

    def load_of(self, sequence: Sequence) -> Load:
        """What it adds while it waits."""
        return Load(1, sequence.num_tokens, sequence.body_bytes, self._cost(sequence))

    def add(self, sequence: Sequence) -> None:
        """It waits from now on. Telling this twice does nothing."""
        if sequence in self:
            return
        tenant = self._tenants.setdefault(sequence.tenant, TenantBacklog())
        waiting = tenant.classes.setdefault(sequence.priority_class, _Class())
        load = waiting.sequences[sequence] = self.load_of(sequence)
        of_class = self._classes.setdefault(sequence.priority_class, Load())
        for sums in (self.total, of_class, tenant.load, waiting.load):
            sums.add(load)

    def discard(self, sequence: Sequence) -> Load | None:
        """It waits no more; what it added, or None when it did not wait."""
        if sequence not in self:
            return None
        tenant = self._tenants[sequence.tenant]
        waiting = tenant.classes[sequence.priority_class]
        load = waiting.sequences.pop(sequence)
        for sums in (self.total, self._classes[sequence.priority_class], tenant.load, waiting.load):
            sums.take(load)
        if not waiting.sequences:
            del tenant.classes[sequence.priority_class]
        if not tenant.classes:
            del self._tenants[sequence.tenant]
        return load

    def of(self, tenant: str) -> Load:
        """A tenant's waiting work."""
        backlog = self._tenants.get(tenant)
        return backlog.load if backlog else Load()

    def of_class(self, priority_class: int) -> Load:
        """What waits in a class, over all tenants."""
        return self._classes.get(priority_class) or Load()

    def tenants(self) -> Iterator[tuple[str, TenantBacklog]]:
        """Those with work waiting."""
        return iter(self._tenants.items())

    def tokens_before(self, tenant: str, arrival: float, head_start: float, priority_class: int, aging: Aging) -> int:
        """Of the tenant's own; see `TenantBacklog.tokens_before`."""
        backlog = self._tenants.get(tenant)
        return backlog.tokens_before(arrival, head_start, priority_class, aging) if backlog else 0

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)
