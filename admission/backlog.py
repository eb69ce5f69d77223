"""The sums of waiting work: in all, of each tenant, and of each tenant's classes."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from admission.step_times.step_time import prefill_pairs
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


class Backlog:
    """The waiting work of all tenants, kept up by telling it of every sequence that begins or ceases to wait."""

    def __init__(self, cost: Callable[[int, float, int], float], shares_blocks: bool = False) -> None:
        """`cost` returns the seconds of engine time of a whole request, by the tokens of its prompt, of its output, and
        those of its prompt that are cached. `shares_blocks`: answers to one prompt start from one prefill.
        """
        self.total = Load()
        self._cost = cost
        self._shares_blocks = shares_blocks
        self._groups: Counter[str] = Counter()  # those that wait, by the prompt that they have in common
        self._loads: dict[Sequence, Load] = {}
        self._of = defaultdict[tuple[str, int | None], Load](Load)  # by tenant and class; None: all of its classes
        self._of_class: defaultdict[int, Load] = defaultdict(Load)
        self._tenants_of: Counter[int | None] = Counter()  # tenants with work waiting, by class

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loads

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
        """Count a sequence that begins to wait."""
        self._loads[sequence] = load
        if sequence.prompt_group is not None:
            self._groups[sequence.prompt_group] += 1
        self.total.add(load)
        self._of_class[sequence.priority_class].add(load)
        for level in (None, sequence.priority_class):
            own = self._of[sequence.tenant, level]
            self._tenants_of[level] += own.count == 0
            own.add(load)

    def discard(self, sequence: Sequence) -> Load | None:
        """Count it no more; returns what it added, None where it does not wait."""
        load = self._loads.pop(sequence, None)
        if load is None:
            return None
        if (group := sequence.prompt_group) is not None:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
        self.total.take(load)
        self._of_class[sequence.priority_class].take(load)
        for level in (None, sequence.priority_class):
            own = self._of[sequence.tenant, level]
            own.take(load)
            if not own.count:
                del self._of[sequence.tenant, level]
                self._tenants_of[level] -= 1
        return load

    def of(self, tenant: str, priority_class: int | None = None) -> Load:
        """Returns a tenant's waiting work, in all or in a class."""
        return self._of.get((tenant, priority_class)) or Load()

    def of_class(self, priority_class: int) -> Load:
        """Returns the work that waits in a class, over all tenants."""
        return self._of_class.get(priority_class) or Load()

    def tenants(self) -> Iterator[tuple[str, Load]]:
        """Returns each tenant with work waiting, and how much."""
        return ((tenant, load) for (tenant, level), load in self._of.items() if level is None)

    def most_urgent(self, tenant: str) -> int | None:
        """Returns the most urgent class in which the tenant has work waiting. O(classes)."""
        return min([level for level in self._of_class if (tenant, level) in self._of], default=None)

    def oldest(self, priority_class: int) -> float | None:
        """Returns when the sequence of the class arrived that has waited longest. O(waiting)."""
        return min([s.arrival for s in self._loads if s.priority_class == priority_class], default=None)

    @property
    def num_tenants(self) -> int:
        return self._tenants_of[None]

    def num_tenants_of(self, priority_class: int) -> int:
        """Returns the number of tenants with work of the class waiting."""
        return self._tenants_of[priority_class]


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
