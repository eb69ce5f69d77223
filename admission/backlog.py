"""The sums of waiting work: in all, of each tenant, and of each tenant's classes."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from admission.aging import Aging
from admission.due_order import DueOrder
from admission.step_times.step_time import plain_sum, prefill_pairs
from backend.scheduler.sequence import Sequence


@dataclass(slots=True)
class Load:
    """An amount of work: requests, uncomputed tokens, bytes of bodies, predicted seconds of the engine's time, and
    pairs of an uncomputed token and one that it attends to.
    """

    count: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    pairs: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.count + other.count,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.pairs + other.pairs,
        )

    def add(self, other: "Load") -> None:
        self.count += other.count
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.pairs += other.pairs

    def take(self, other: "Load") -> None:
        """Subtract the other. Without requests the seconds are exactly 0, whatever rounding left behind."""
        self.count -= other.count
        self.tokens -= other.tokens
        self.bytes -= other.bytes
        self.pairs -= other.pairs
        self.seconds = max(0.0, self.seconds - other.seconds) if self.count else 0.0


@dataclass(slots=True)
class QueuePosition:
    """Where a newcomer comes among others of its tenant, and of others with deadlines."""

    key: float  # see `Aging.due`
    is_pressing: bool = False

    @classmethod
    def of(cls, sequence: Sequence, aging: Aging) -> "QueuePosition":
        """Returns the position of a sequence that has just arrived."""
        return cls(aging.due(sequence), sequence.is_pressing)


class WorkAhead(NamedTuple):
    """The work that comes before a newcomer's: it needs the time of its tokens, and a slot for each request, which the
    answers hold for so many steps together.
    """

    tokens: float
    requests: float
    steps: float


class _Class:
    """One tenant's waiting sequences of one class, those that came first in front; of those without pressing deadlines
    the sums by the second in which they are due (see `Aging.due`).
    """

    __slots__ = ("due", "load", "num_patient", "patient", "sequences")

    def __init__(self) -> None:
        self.load = Load()
        self.patient = self.num_patient = 0  # tokens and requests without pressing deadlines
        self.sequences: OrderedDict[Sequence, tuple[Load, int]] = OrderedDict()
        self.due: dict[int, tuple[int, int]] = {}  # tokens and requests

    @property
    def oldest(self) -> float:
        return next(iter(self.sequences)).arrival

    def add_patient(self, second: int, tokens: int, requests: int) -> None:
        before = self.due.get(second, (0, 0))
        after = before[0] + tokens, before[1] + requests
        self.patient += tokens
        self.num_patient += requests
        if after[1]:
            self.due[second] = after
        else:
            del self.due[second]


class TenantBacklog:
    """One tenant's waiting work."""

    __slots__ = ("classes", "load")

    def __init__(self) -> None:
        self.load = Load()
        self.classes: defaultdict[int, _Class] = defaultdict(_Class)  # those with work

    @property
    def patient(self) -> tuple[int, int]:
        """Tokens and requests without pressing deadlines."""
        waiting = self.classes.values()
        return sum([one.patient for one in waiting]), sum([one.num_patient for one in waiting])

    def before(self, position: QueuePosition) -> tuple[int, int]:
        """Returns tokens and requests without pressing deadlines that are due before a newcomer, to the second. O(the
        seconds for which the oldest has waited).
        """
        tokens = requests = 0
        for waiting in self.classes.values():
            for second, (due_tokens, due_requests) in waiting.due.items():
                if second <= position.key:
                    tokens += due_tokens
                    requests += due_requests
        return tokens, requests

    def within(self, cap: float) -> float:
        """Returns the tenant's tokens without pressing deadlines, no class counting for more than the cap."""
        total = 0.0
        for waiting in self.classes.values():
            tokens = waiting.patient
            if tokens < cap:  # and no `min`: for each of 64 tenants at every arrival
                total += tokens
            else:
                total += cap
        return total


class _Level:
    """One class over all tenants."""

    __slots__ = ("load", "num_tenants", "sizes")

    def __init__(self) -> None:
        self.load = Load()
        self.num_tenants = 0
        self.sizes: list[int] = []  # tokens of each tenant without pressing deadlines, ascending

    def resize(self, before: int, after: int) -> None:
        """Note that a tenant has so many tokens waiting; 0: none. O(tenants), as a move of memory."""
        if before:
            del self.sizes[bisect_left(self.sizes, before)]
        if after:
            insort(self.sizes, after)

    def within(self, cap: float) -> float:
        """Returns tokens, no tenant counting for more than the cap. O(tenants), as a sum of a list."""
        small = bisect_right(self.sizes, cap)
        return sum(self.sizes[:small]) + (len(self.sizes) - small) * cap


class Backlog:
    """The waiting work of all tenants, kept up by telling it of every sequence that begins or ceases to wait."""

    def __init__(self, cost: Callable[[int, float, int], float], aging: Aging, shares_blocks: bool = False) -> None:
        """`cost` returns the seconds of engine time of a whole request, by the tokens of its prompt, of its output, and
        those of its prompt that are cached. `shares_blocks`: answers to one prompt start from one prefill.
        """
        self.total = Load()
        self.pressing = DueOrder()
        self.aging = aging  # of those that come from now on
        self._cost = cost
        self._shares_blocks = shares_blocks
        self._groups: Counter[str] = Counter()  # those that wait, by the prompt that they have in common
        self._tenants = defaultdict[str, TenantBacklog](TenantBacklog)  # with work; who waited longest in front
        self._levels = defaultdict[int, _Level](_Level)

    def __contains__(self, sequence: Sequence) -> bool:
        waiting = self._class(sequence.tenant, sequence.priority_class)
        return waiting is not None and sequence in waiting.sequences

    def load_of(self, sequence: Sequence, output: float) -> Load:
        """Returns the work that a sequence adds while it waits, whose output is expected to have so many tokens."""
        cached = self.num_cached_tokens(sequence)
        seconds = self._cost(len(sequence.prompt), output, cached)
        tokens = sequence.num_tokens - cached
        return Load(1, tokens, sequence.body_bytes, seconds, prefill_pairs(cached, tokens))

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Returns the prompt tokens that need not be computed for one that is about to wait: those that are kept for
        it, or all but one where another answer to the same prompt waits before it, for which they are.
        """
        group = sequence.prompt_group
        if group is None or not self._shares_blocks or not self._groups[group] or sequence.output:
            return sequence.num_pinned_tokens
        return len(sequence.prompt) - 1

    def add(self, sequence: Sequence, load: Load) -> None:
        """Count a sequence that waits from now on, and the work that it adds. A second time changes nothing."""
        tenant, level = self._tenants[sequence.tenant], self._levels[sequence.priority_class]
        waiting = tenant.classes[sequence.priority_class]
        if sequence in waiting.sequences:
            return
        level.num_tenants += not waiting.sequences
        due = self.aging.due(sequence)
        second = floor(due)
        waiting.sequences[sequence] = load, second
        if sequence.prompt_group is not None:
            self._groups[sequence.prompt_group] += 1
        for sums in (self.total, level.load, tenant.load, waiting.load):
            sums.add(load)
        if sequence.is_pressing:
            self.pressing.add(sequence, due, load.tokens)
        else:
            before = waiting.patient
            waiting.add_patient(second, load.tokens, 1)
            level.resize(before, waiting.patient)

    def discard(self, sequence: Sequence) -> Load | None:
        """Count a sequence no more; returns the work it had added, or None when it did not wait."""
        waiting = self._class(sequence.tenant, sequence.priority_class)
        if waiting is None or sequence not in waiting.sequences:
            return None
        load, second = waiting.sequences.pop(sequence)
        if (group := sequence.prompt_group) is not None:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
        tenant, level = self._tenants[sequence.tenant], self._levels[sequence.priority_class]
        for sums in (self.total, level.load, tenant.load, waiting.load):
            sums.take(load)
        if sequence.is_pressing:
            self.pressing.discard(sequence)
        else:
            before = waiting.patient
            waiting.add_patient(second, -load.tokens, -1)
            level.resize(before, waiting.patient)
        if not waiting.sequences:
            level.num_tenants -= 1
            del tenant.classes[sequence.priority_class]
        if not tenant.classes:
            del self._tenants[sequence.tenant]
        return load

    def of(self, tenant: str, priority_class: int | None = None) -> Load:
        """Returns a tenant's waiting work, in all or in a class."""
        if priority_class is None:
            backlog = self._tenants.get(tenant)
            return backlog.load if backlog else Load()
        waiting = self._class(tenant, priority_class)
        return waiting.load if waiting else Load()

    def tokens_of(self, sequence: Sequence) -> int:
        """Returns the tokens that a sequence adds while it waits; 0 where it does not."""
        waiting = self._class(sequence.tenant, sequence.priority_class)
        found = waiting.sequences.get(sequence) if waiting else None
        return found[0].tokens if found else 0

    def most_urgent(self, tenant: str) -> int | None:
        """Returns the most urgent class in which the tenant has work waiting."""
        backlog = self._tenants.get(tenant)
        return min(backlog.classes, default=None) if backlog else None

    def oldest(self, priority_class: int) -> float | None:
        """Returns when the sequence of the class arrived that has waited longest. O(tenants)."""
        waiting = (tenant.classes.get(priority_class) for tenant in self._tenants.values())
        return min((one.oldest for one in waiting if one), default=None)

    def of_class(self, priority_class: int) -> Load:
        """Returns the work that waits in a class, over all tenants."""
        level = self._levels.get(priority_class)
        return level.load if level else Load()

    def tenants(self) -> Iterator[tuple[str, TenantBacklog]]:
        """Returns the tenants with work waiting, the one that began to wait first in front."""
        return iter(self._tenants.items())

    def before(self, tenant: str, position: QueuePosition) -> tuple[int, int]:
        """Returns `TenantBacklog.before` of the tenant's own work."""
        backlog = self._tenants.get(tenant)
        return backlog.before(position) if backlog else (0, 0)

    def within(self, cap: float, besides: Iterable[str]) -> float:
        """Returns tokens without pressing deadlines of all tenants besides these, no class of one counting for more
        than the cap.
        """
        total = plain_sum(level.within(cap) for level in self._levels.values())
        return total - plain_sum(self._tenants[name].within(cap) for name in besides if name in self._tenants)

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def num_tenants_of(self, priority_class: int) -> int:
        """Returns the number of tenants with work of the class waiting."""
        level = self._levels.get(priority_class)
        return level.num_tenants if level else 0

    def _class(self, tenant: str, priority_class: int) -> _Class | None:
        backlog = self._tenants.get(tenant)
        return backlog.classes.get(priority_class) if backlog else None


PERIODS = 60  # remembered
PERIOD = 1.0  # seconds
SLOW_SHARE = 0.1  # the quantile by which `Retry-After` is estimated
UNMEASURED = 0.5  # seconds of predicted engine time a second
SLOWEST = 0.01


class DrainMeter:
    """Predicted engine seconds that leave the queue in a second, over periods in which something waited throughout.

    A queue that runs empty says nothing of how fast a longer one would drain.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=PERIODS)
        self._slow = UNMEASURED
        self._since: float | None = None  # something has waited since
        self._drained = 0.0

    def left(self, seconds: float, still_waiting: bool, now: float) -> None:
        """Note that work of so many predicted seconds was taken from the queue."""
        self._drained += seconds
        self.sample(still_waiting, now)

    def sample(self, waiting: bool, now: float) -> None:
        """Note whether anything waits at this moment."""
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since, self._drained = now, 0.0
        elif now - self._since >= PERIOD:
            self._rates.append(self._drained / (now - self._since))
            self._slow = max(sorted(self._rates)[int(SLOW_SHARE * len(self._rates))], SLOWEST)
            self._since, self._drained = now, 0.0

    @property
    def slow_rate(self) -> float:
        """The rate that nine in ten periods reached."""
        return self._slow
