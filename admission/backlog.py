"""The backlog: the waiting work in total, by tenant, and by tenant and class. The controller writes it."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from admission.step_times.step_time import prefill_pairs
from backend.scheduler.sequence import Sequence


@dataclass(slots=True)
class Load:
    """An amount of work: requests, uncomputed tokens, bytes of bodies, predicted engine seconds, and pairs of an
    uncomputed token and a token that it attends to.
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

    def add_to(self, sums: Iterable["Load"]) -> None:
        for one in sums:
            one.count += self.count
            one.tokens += self.tokens
            one.bytes += self.bytes
            one.seconds += self.seconds
            one.pairs += self.pairs

    def subtract_from(self, sums: Iterable["Load"]) -> None:
        """Subtract it from each. Without requests the seconds are exactly 0, free of rounding errors."""
        for one in sums:
            one.count -= self.count
            one.tokens -= self.tokens
            one.bytes -= self.bytes
            one.pairs -= self.pairs
            one.seconds = max(0.0, one.seconds - self.seconds) if one.count else 0.0


class Backlog:
    """The waiting work of all tenants; the owner reports every sequence that begins or ceases to wait."""

    def __init__(self, cost: Callable[[Sequence, float, int], float], shares_blocks: bool = False) -> None:
        """`cost` predicts a request's engine seconds from the request, its output tokens and cached prompt tokens.
        `shares_blocks`: answers to one prompt share one prefill.
        """
        self.total = Load()
        self._cost = cost
        self._shares_blocks = shares_blocks
        self._groups: Counter[str] = Counter()  # waiting sequences by prompt group
        self._loads: dict[Sequence, Load] = {}
        self._of = defaultdict[tuple[str, int | None], Load](Load)  # by tenant and class; None: all of its classes
        self._of_class: defaultdict[int, Load] = defaultdict(Load)
        self._tenants_of: Counter[int | None] = Counter()  # tenants with work waiting, by class

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loads

    def load_of(self, sequence: Sequence, output: float) -> Load:
        """Return the work of a waiting sequence whose expected output is `output` tokens."""
        cached = self.num_cached_tokens(sequence)
        seconds = self._cost(sequence, output, cached)
        tokens = sequence.num_tokens - cached
        return Load(1, tokens, sequence.request.body_bytes, seconds, prefill_pairs(cached, tokens))

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the prompt tokens of a sequence, about to wait, that need no computing: its cached ones, or all but
        one if another answer to the same prompt waits already.
        """
        group = sequence.prompt_group
        if group is None or not self._shares_blocks or not self._groups[group] or sequence.output:
            return sequence.num_found_tokens
        return sequence.num_prompt_tokens - 1

    def add(self, sequence: Sequence, load: Load) -> None:
        self._loads[sequence] = load
        if sequence.prompt_group is not None:
            self._groups[sequence.prompt_group] += 1
        tenant, level = sequence.tenant, sequence.request.priority_class
        own, own_of_class = self._of[tenant, None], self._of[tenant, level]
        self._tenants_of[None] += own.count == 0
        self._tenants_of[level] += own_of_class.count == 0
        load.add_to((self.total, self._of_class[level], own, own_of_class))

    def discard(self, sequence: Sequence) -> Load | None:
        """Stop counting a sequence; returns its work, None if it does not wait."""
        load = self._loads.pop(sequence, None)
        if load is None:
            return None
        if (group := sequence.prompt_group) is not None:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
        tenant, level = sequence.tenant, sequence.request.priority_class
        own, own_of_class = self._of[tenant, None], self._of[tenant, level]
        load.subtract_from((self.total, self._of_class[level], own, own_of_class))
        for key, of_key in ((None, own), (level, own_of_class)):
            if not of_key.count:
                del self._of[tenant, key]
                self._tenants_of[key] -= 1
        return load

    def of(self, tenant: str, priority_class: int | None = None) -> Load:
        """Return a tenant's waiting work: of one class, or of all."""
        return self._of.get((tenant, priority_class)) or Load()

    def of_class(self, priority_class: int) -> Load:
        """Return the waiting work of a class, over all tenants."""
        return self._of_class.get(priority_class) or Load()

    def tenants(self) -> Iterator[tuple[str, Load]]:
        """Yield each tenant with waiting work, and its work."""
        return ((tenant, load) for (tenant, level), load in self._of.items() if level is None)

    def most_urgent(self, tenant: str) -> int | None:
        """Return the most urgent class in which the tenant has waiting work. O(classes)."""
        return min([level for level in self._of_class if (tenant, level) in self._of], default=None)

    def oldest(self, priority_class: int) -> float | None:
        """Return the earliest arrival among waiting sequences of the class. O(waiting)."""
        return min([s.arrival for s in self._loads if s.request.priority_class == priority_class], default=None)

    def num_tenants(self, priority_class: int | None = None) -> int:
        """Return the number of tenants with waiting work: of the class, or of any."""
        return self._tenants_of[priority_class]


DRAIN_PERIODS_REMEMBERED = 60  # the newest periods, over which the quantile is taken
DRAIN_PERIOD_S = 1.0  # the least length of a period, in seconds
SLOW_DRAIN_QUANTILE = 0.1  # the quantile of drain rates from which `Retry-After` is estimated
UNMEASURED_DRAIN_RATE = 0.5  # predicted engine seconds a second, before the first period is measured
MIN_DRAIN_RATE = 0.01


class DrainMeter:
    """The drain rate: predicted engine seconds that leave the queue in a second, over periods in which the queue was
    never empty.

    A queue that runs empty says nothing of how fast a longer queue would drain.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=DRAIN_PERIODS_REMEMBERED)
        self.slow_rate = UNMEASURED_DRAIN_RATE  # that nine in ten periods reached
        self._since: float | None = None  # the start of the period in which the queue was never empty
        self._drained = 0.0

    def left(self, seconds: float, still_waiting: bool, now: float) -> None:
        """Note that work of `seconds` predicted engine seconds left the queue."""
        self._drained += seconds
        self.sample(still_waiting, now)

    def sample(self, waiting: bool, now: float) -> None:
        """Record that the queue has waiting work now, or none."""
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since, self._drained = now, 0.0
        elif now - self._since >= DRAIN_PERIOD_S:
            self._rates.append(self._drained / (now - self._since))
            self.slow_rate = max(sorted(self._rates)[int(SLOW_DRAIN_QUANTILE * len(self._rates))], MIN_DRAIN_RATE)
            self._since, self._drained = now, 0.0
