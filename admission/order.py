"""One order: the request due first goes first, in the queue, inside a step, in the forecast and, reversed, among
victims.

A request with a pressing deadline, one at most `PRESSING_WAIT_S` (10 s) after its arrival, is due at its deadline,
until that has passed. Any other request, for example of a client that gives up after minutes, is due now, and later by
what is left of the offset of its class and by the time in which its tenant's share pays the tenant's debt
(`Share.payback`); earlier, if the tenant has credit. Where four tenants of weight 1 ask, 2 s of debt make 8 s. While a
request does not wait, the time of its payback and the age of its class stay as they were when it left the queue: only
an edit of offsets and the most urgent open class move it, as they move later ones of its class.

The offset of a class counts from that of the most urgent class with an open request: where no more urgent one is open,
requests of a class yield to none, nor to its own deadlines. No class stays open for a request that has ended or was
refused: sent from time to time it would cost nothing, and delay others for good. The offset runs down while the oldest
request of the class waits, for all of them: classes age, and inside a class tenants differ by debts and not by how long
their requests have waited. Otherwise a tenant with a backlog would go before another tenant's newcomer by its age,
until debts of that many seconds had been made.

Of one tenant's requests without deadlines, the most urgent class goes first, and in it what has begun before, and then
the shortest that can still be in time; and `OLDEST_SHARE_OF_SERVICE` of the tenant's service goes to its oldest, so
that none waits for ever.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from operator import attrgetter
from typing import Protocol

from admission.backlog import Load
from admission.forecast import DueRequest, ForecastOrder, WorkAhead
from admission.share import Account, Share
from backend.scheduler.sequence import DEFAULT_FIRST_TOKEN_S, SPARE_CLASS, Sequence
from backend.scheduler.waiting_queue import WaitingQueue

IN_TIME_SHARE_OF_TARGET = 0.85
"""The share of its target that a request may wait and still be in time: the rest is for its own prefill."""
OLDEST_SHARE_OF_SERVICE = 0.25
"""The share of a tenant's service without deadlines that its oldest request has, however short the others are."""

DEBT_TOLERANCE_S = 2.0
"""Engine seconds, for each unit of weight, that a tenant may be in debt and leave others no room."""
DEBT_RAMP_S = 16.0
"""Engine seconds of debt beyond the tolerance, over which the room that a debtor leaves grows to the whole guard."""

MIN_STALE_ENTRIES = 64  # requests that may have left a heap before it is made anew
MAX_TENANTS_EXAMINED = 32  # by a forecast, as each takes microseconds
OWED_TO_OLDEST_LIMIT_S = 1.0  # engine seconds that a tenant's oldest may be owed: the cost of a few requests

_DUE = attrgetter("due")

Aging = tuple[float, ...]
"""By class, the seconds by which its requests are due later than those of the most urgent class; never falling."""


def class_offsets(seconds_per_class: float = 2.0, first: Aging = ()) -> Aging:
    """Return the offsets of all classes: `first` of the first ones, and `seconds_per_class` more for each further one.
    Raises `ValueError`.
    """
    if not seconds_per_class >= 0:
        raise ValueError(f"seconds_per_class must be at least 0, got {seconds_per_class}")
    if list(first) != sorted(first):
        raise ValueError(f"offsets must not fall from class to class, got {first}")
    first = first or (0.0,)
    return (*first, *[first[-1] + n * seconds_per_class for n in range(1, SPARE_CLASS + 2 - len(first))])


def _deadline(sequence: Sequence) -> float:
    assert sequence.request.first_token_by is not None, "it presses"
    return sequence.request.first_token_by


def has_begun(sequence: Sequence) -> bool:
    """Return True for a request that was computed before and waits again, as after a preemption."""
    return bool(sequence.output) or sequence.num_preemptions > 0 or sequence.num_yields > 0


class UndatedBacklog:
    """One tenant's waiting requests without deadlines. Each operation costs O(log waiting)."""

    def __init__(self, account: Account, number: int, aging: Aging) -> None:
        """`number` identifies the backlog; later backlogs have larger numbers."""
        self.account, self.number, self.aging = account, number, aging
        self.level = -1  # the class by which it is ranked
        self.sizes: dict[Sequence, tuple[int, Load]] = {}  # number, and work without bytes and pairs
        self._classes: dict[int, Load] = {}  # the sum of their work, by class
        self._by_age: list[tuple[float, int, Sequence]] = []  # heaps; removed requests leave them lazily
        self._by_size: list[tuple[int, float, int, Sequence]] = []
        # Engine seconds of its quarter that the oldest late request has not had. Service of others adds a quarter of
        # itself, its own takes three quarters; below 0 it has had more than a quarter.
        self._owed_to_oldest = 0.0

    def add(self, sequence: Sequence, number: int, seconds: float, tokens: int) -> None:
        load = Load(1, tokens, 0, seconds)
        self.sizes[sequence] = number, load
        load.add_to((self._classes.setdefault(sequence.request.priority_class, Load()),))
        heappush(self._by_age, (self._rank_by_age(sequence), number, sequence))
        heappush(self._by_size, self._sized(sequence))
        if max(len(self._by_age), len(self._by_size)) > 4 * len(self.sizes) + MIN_STALE_ENTRIES:
            self._rebuild()

    def remove(self, sequence: Sequence, now: float) -> None:
        is_oldest = sequence is self.oldest()
        _, load = self.sizes.pop(sequence)
        level, seconds = sequence.request.priority_class, load.seconds
        load.subtract_from((self._classes[level],))
        if not self._classes[level].count:
            del self._classes[level]
        if not self.sizes:  # it is never used again
            self._by_age.clear()
            self._by_size.clear()
        elif self._is_late(sequence, now) and is_oldest:
            self._owed_to_oldest -= (1 - OLDEST_SHARE_OF_SERVICE) * seconds
        else:
            self._owed_to_oldest = min(self._owed_to_oldest + OLDEST_SHARE_OF_SERVICE * seconds, OWED_TO_OLDEST_LIMIT_S)

    def set_policy(self, aging: Aging) -> None:
        """Order its requests by these class offsets; it has to be ranked anew."""
        self.aging, self.level = aging, -1
        self._rebuild()

    def _rebuild(self) -> None:
        """Make both heaps anew: a removed request that never comes to the top would stay in memory."""
        waiting = list(self.sizes)
        self._by_age = [(self._rank_by_age(one), self.sizes[one][0], one) for one in waiting]
        self._by_size = [self._sized(one) for one in waiting]
        heapify(self._by_age)
        heapify(self._by_size)

    def work(self, priority_class: int) -> Load:
        """Return the waiting work of this class and higher ones. O(classes)."""
        total = Load()
        for level, work in self._classes.items():
            if level <= priority_class:
                work.add_to((total,))
        return total

    def classes_below(self, priority_class: int) -> list[int]:
        """Return the less urgent classes with waiting work. O(classes)."""
        return [level for level in self._classes if level > priority_class]

    @property
    def most_urgent(self) -> int:
        """The most urgent class with waiting work. O(classes)."""
        return min(self._classes)

    def first(self, now: float) -> Sequence:
        """Return the request that goes first; the backlog is not empty.

        The oldest goes first once it is late, unless it has had its quarter of the service; else those that have begun,
        then the shortest. A late request leaves the heap by size for good: it waits for its turn as the oldest.
        """
        oldest = self.oldest()
        if not self._is_late(oldest, now) or self._owed_to_oldest < 0.0:
            heap = self._by_size
            while heap and self._goes_by_age(heap[0][3], heap[0][2], now):
                heappop(heap)
            if heap:
                return heap[0][3]
        return oldest

    def oldest(self) -> Sequence:
        """Return the oldest request, classes by their offsets."""
        heap, sizes = self._by_age, self.sizes
        while (found := sizes.get(heap[0][2])) is None or found[0] != heap[0][1]:
            heappop(heap)
        return heap[0][2]

    def _goes_by_age(self, sequence: Sequence, number: int, now: float) -> bool:
        """Return True for a request that has left, or is late and has not begun."""
        found = self.sizes.get(sequence)
        return found is None or found[0] != number or (not has_begun(sequence) and self._is_late(sequence, now))

    def _sized(self, sequence: Sequence) -> tuple[int, float, int, Sequence]:
        """Return an entry of the heap by size: a request that has begun goes before the others of its class."""
        number, load = self.sizes[sequence]
        return sequence.request.priority_class, -1.0 if has_begun(sequence) else load.seconds, number, sequence

    def _is_late(self, sequence: Sequence, now: float) -> bool:
        target, level = sequence.request.first_token_target, sequence.request.priority_class
        in_time_s = IN_TIME_SHARE_OF_TARGET * (DEFAULT_FIRST_TOKEN_S if target is None else target)
        return now > sequence.arrival + in_time_s + self.aging[level]

    def _rank_by_age(self, sequence: Sequence) -> float:
        return sequence.arrival + self.aging[sequence.request.priority_class]


class TenantRanking:
    """Tenants whose requests due first, without deadlines, are of one class: the most credit first. Grants change all
    credits alike, so a heap of offsets ranks them from plan to plan.
    """

    def __init__(self, tenants: Mapping[str, UndatedBacklog], level: int) -> None:
        """`tenants` holds all tenants by name, of every class."""
        self._of, self._level = tenants, level
        self._ranks: list[tuple[float, int, UndatedBacklog]] = []  # a heap; outdated entries leave it lazily

    def place(self, undated: UndatedBacklog) -> None:
        """Rank a tenant anew: its oldest request has changed, it is released from hold, or its credit has grown
        otherwise than by grants.
        """
        undated.level = self._level
        heappush(self._ranks, (undated.account.offset, undated.number, undated))
        if len(self._ranks) > 4 * len(self._of) + 64:
            own = [one for one in self._of.values() if one.level == self._level]
            self._ranks = [(one.account.offset, one.number, one) for one in own]
            heapify(self._ranks)

    def first(self, held: Set[str]) -> UndatedBacklog | None:
        """Return the tenant due first among tenants not on hold. O(log tenants)."""
        while self._ranks:
            rank, number, undated = self._ranks[0]
            if not undated.sizes or undated.level != self._level or undated.account.tenant in held:
                heappop(self._ranks)
            elif rank != undated.account.offset:
                heapreplace(self._ranks, (undated.account.offset, number, undated))
            else:
                return undated
        return None


class ClassAges:
    """The waiting time of the oldest request of each class, among requests without deadlines that have not begun."""

    def __init__(self, waits: Callable[[Sequence, int], bool]) -> None:
        """`waits` tells if a request still waits under the number with which it was added."""
        self._waits = waits
        self._arrivals: dict[int, list[tuple[float, int, Sequence]]] = {}  # heaps; removed requests leave them lazily
        self._held: dict[str, list[tuple[float, int, Sequence]]] = {}  # requests of tenants on hold, by tenant
        self._limit = MIN_STALE_ENTRIES  # length of a heap above which removed requests are taken out

    def add(self, sequence: Sequence, number: int) -> None:
        heap = self._arrivals.setdefault(sequence.request.priority_class, [])
        heappush(heap, (sequence.arrival, number, sequence))
        if len(heap) > self._limit:
            heap[:] = [entry for entry in heap if self._waits(entry[2], entry[1])]
            heapify(heap)
            self._limit = 2 * len(heap) + MIN_STALE_ENTRIES

    def released(self, tenant: str) -> None:
        """Count a tenant's requests again, which is no longer on hold."""
        for _, number, sequence in self._held.pop(tenant, []):
            self.add(sequence, number)

    def age(self, level: int, now: float, held: Set[str]) -> float:
        """Return the seconds for which the class has waited; 0 where none of its requests waits."""
        heap = self._arrivals.get(level)
        while heap:
            arrival, number, sequence = heap[0]
            if self._waits(sequence, number):
                if sequence.tenant not in held:
                    return max(0.0, now - arrival)
                self._held.setdefault(sequence.tenant, []).append(heap[0])
            heappop(heap)
        return 0.0


class DueOrder:
    """A `WaitingQueue` in the order in which requests are due."""

    def __init__(
        self, share: Share, aging: Aging, seconds: Callable[[Sequence], float], uncached: Callable[[Sequence], int]
    ) -> None:
        """Both functions are called when a request begins to wait. `seconds` predicts its engine seconds, by which one
        tenant's requests are ordered among themselves; `uncached` returns its uncomputed tokens.
        """
        self.share, self.aging, self._seconds, self._uncached = share, aging, seconds, uncached
        self.now = 0.0
        self.dated: list[DueRequest] = []  # sorted
        self.undated: dict[str, UndatedBacklog] = {}  # by tenant, a new one for each new backlog, never empty
        self._held: set[str] = set()  # tenants on hold
        self._dues: dict[Sequence, tuple[float, float]] = {}  # `_due_and_age` as they last left the queue
        self._waiting: dict[Sequence, DueRequest | None] = {}
        self._numbers = count()
        self._rankings: dict[int, TenantRanking] = {}  # by class
        self._ages = ClassAges(self._waits)
        self._open = defaultdict[int, set[Sequence]](set)  # requests that have not ended, by class
        self._first_offset = inf  # of the most urgent open class; inf: none is

    def __len__(self) -> int:
        return len(self._waiting)

    # the order

    def due(self, sequence: Sequence) -> float:
        """Return when a request is due, in seconds of the engine's clock: as of now while it waits, else as of when it
        left the queue.
        """
        due, age = self._dues.get(sequence) or self._due_and_age(sequence)
        return due + self._offset_left(sequence.request.priority_class, age)

    def _due_and_age(self, sequence: Sequence) -> tuple[float, float]:
        """Return when a request is due now, but for its class's offset, and the age of its class, which takes from that
        offset. The age is infinite if the request is due at its deadline: no offset is left then.
        """
        if self._is_dated(sequence):
            return _deadline(sequence), inf
        payback = self.share.payback(self.share.account(sequence.tenant))
        age = self._ages.age(sequence.request.priority_class, self.now, self._held)
        return self.now + payback, age

    def _is_dated(self, sequence: Sequence) -> bool:
        """Return True until its deadline has passed, if that presses: a deadline of the past would be due first for
        ever.
        """
        return sequence.is_pressing and _deadline(sequence) >= self.now

    def _offset(self, level: int) -> float:
        """Return what is left now of the offset of a class."""
        return self._offset_left(level, self._ages.age(level, self.now, self._held))

    def _offset_left(self, level: int, age: float) -> float:
        """Return what is left of the offset of a class that has waited for `age` seconds, beyond the offset of the most
        urgent open class.
        """
        return max(0.0, self.aging[level] - self._first_offset - age)

    def _due_of(self, undated: UndatedBacklog) -> float:
        """Return when a tenant's requests without deadlines are due."""
        return self.now + self.share.payback(undated.account) + self._offset(undated.level)

    def _waits(self, sequence: Sequence, number: int) -> bool:
        undated = self.undated.get(sequence.tenant)
        found = None if undated is None else undated.sizes.get(sequence)
        return found is not None and found[0] == number

    def _place(self, undated: UndatedBacklog) -> None:
        level = undated.oldest().request.priority_class
        ranking = self._rankings.get(level)
        if ranking is None:
            ranking = self._rankings[level] = TenantRanking(self.undated, level)
        ranking.place(undated)

    # waiting

    def add(self, sequence: Sequence) -> None:
        self.now = max(self.now, sequence.arrival)
        self._dues.pop(sequence, None)
        self._open[sequence.request.priority_class].add(sequence)
        number, tokens = next(self._numbers), self._uncached(sequence)
        if self._is_dated(sequence):
            self._waiting[sequence] = entry = DueRequest(_deadline(sequence), number, sequence, tokens)
            insort(self.dated, entry)
            return
        self._waiting[sequence] = None
        undated = self.undated.get(sequence.tenant)
        if undated is None:
            account = self.share.account(sequence.tenant)
            undated = self.undated[sequence.tenant] = UndatedBacklog(account, number, self.aging)
        undated.add(sequence, number, self._seconds(sequence), tokens)
        if not has_begun(sequence):
            self._ages.add(sequence, number)
        self._count_waiting(undated)
        self._place(undated)

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._dues[sequence] = self._due_and_age(sequence)
        entry = self._waiting.pop(sequence)
        if entry is not None:
            del self.dated[bisect_left(self.dated, entry)]
            return
        undated = self.undated[sequence.tenant]
        undated.remove(sequence, self.now)
        if undated.sizes:
            self._place(undated)
        else:
            del self.undated[sequence.tenant]
            self._count_waiting(undated)

    def head(self) -> Sequence | None:
        """Return the waiting request due first, of tenants not on hold. A tenant's requests without deadlines are due
        when the oldest of them is.
        """
        if not self._waiting:
            return None
        dated = next((entry for entry in self.dated if entry.sequence.tenant not in self._held), None)
        first = self._first_tenant()
        if first is None or (dated is not None and dated.due <= first[0]):
            return dated.sequence if dated is not None else None
        return first[2].first(self.now)

    def _first_tenant(self) -> tuple[float, int, UndatedBacklog] | None:
        """Return the tenant due first among tenants not on hold, behind its due time and its number. O(classes log
        tenants).
        """
        repaid, self.share.repaid = self.share.repaid, []
        for account in repaid:
            account.is_repaid = False
            if (waiting := self.undated.get(account.tenant)) is not None:
                self._rankings[waiting.level].place(waiting)
        firsts = [ranking.first(self._held) for ranking in self._rankings.values()]
        return min([(self._due_of(one), one.number, one) for one in firsts if one is not None], default=None)

    def first_that(self, may: Callable[[str, int], bool]) -> Sequence | None:
        """Return the waiting request due first, of tenants not on hold, whose tenant and class pass the test. O(tenants
        + requests with deadlines).
        """
        held = self._held
        others = (entry for entry in self.dated if entry.sequence.tenant not in held)
        dated = next((e for e in others if may(e.sequence.tenant, e.sequence.request.priority_class)), None)
        tenants = [one for tenant, one in self.undated.items() if tenant not in held and may(tenant, one.most_urgent)]
        for due, _, undated in sorted([(self._due_of(one), one.number, one) for one in tenants]):
            if dated is not None and dated.due <= due:
                break
            first = undated.first(self.now)
            if may(first.tenant, first.request.priority_class):
                return first
        return dated.sequence if dated is not None else None

    def set_policy(self, aging: Aging) -> None:
        """Order by these class offsets, and by the share's present weights."""
        self.aging = aging
        self.set_time(self.now)
        self._rankings.clear()
        for undated in self.undated.values():
            undated.set_policy(aging)
            self._place(undated)

    def hold(self, tenant: str, reason: str | None) -> None:
        if reason is not None:
            self._held.add(tenant)
        elif tenant in self._held:
            self._held.remove(tenant)
            self._ages.released(tenant)
        else:
            return
        if (undated := self.undated.get(tenant)) is not None:
            self._count_waiting(undated)
            if reason is None:
                self._place(undated)

    def _count_waiting(self, undated: UndatedBacklog) -> None:
        """Lift the limit of the tenant's credit while it waits for other tenants, and not for a limit of its own."""
        tenant = undated.account.tenant
        self.share.waits(undated.account, is_waiting=bool(undated.sizes) and tenant not in self._held)

    def set_time(self, now: float) -> None:
        self.now = max(self.now, now)
        self.share.set_time(self.now)
        self._first_offset = min([self.aging[level] for level, found in self._open.items() if found], default=inf)
        while self.dated and self.dated[0].due < self.now:
            passed = self.dated[0].sequence
            self.remove(passed)
            self.add(passed)

    def asked(self, sequence: Sequence, now: float) -> None:
        """Note a request of its tenant, admitted or refused. Until the time is set again its class counts as open."""
        self.set_time(now)
        self._first_offset = min(self._first_offset, self.aging[sequence.request.priority_class])
        self.share.asked(self.share.account(sequence.tenant))

    def ended(self, sequence: Sequence) -> None:
        """Forget a request that has ended."""
        self._dues.pop(sequence, None)
        self._open[sequence.request.priority_class].discard(sequence)

    # the forecast

    def ahead(self, sequence: Sequence, due: float) -> WorkAhead:
        """Return the waiting work due before a newcomer: requests with earlier deadlines and, of each tenant's others,
        the work that its share of the engine computes between the due time of its first and the newcomer's.

        A newcomer without a deadline goes behind its tenant's waiting requests, and is due later by the time its
        tenant's share needs for them. O(requests with earlier deadlines).
        """
        level, tokens, requests, own = sequence.request.priority_class, 0.0, 0.0, 0.0
        is_dated = self._is_dated(sequence)
        if not is_dated and (undated := self.undated.get(sequence.tenant)) is not None:
            work, weight = undated.work(level), undated.account.weight
            tokens, requests, own = float(work.tokens), float(work.count), float(work.tokens)
            due += work.seconds * max(self.share.asking_weight, weight) / weight
        tenant, held = sequence.tenant, self._held
        for entry in self.due_by(due):
            tokens += entry.tokens
            requests += 1.0
            own += entry.tokens if entry.sequence.tenant == tenant else 0
        weight_of_all = self.share.asking_weight
        for undated, times in self._examined(None if is_dated else tenant):
            if undated.account.tenant in held:
                continue
            lowest, until = level, due - self._due_of(undated)
            soonest = self.now + self.share.payback(undated.account)
            for lower in undated.classes_below(level):  # due earlier than the newcomer too, where the class has aged
                if (left := due - soonest - self._offset(lower)) > 0.0:
                    lowest, until = max(lowest, lower), max(until, left)
            work = undated.work(lowest)
            if until > 0.0 and work.seconds > 0.0:
                weight = undated.account.weight
                part = times * min(1.0, until * weight / max(weight_of_all, weight) / work.seconds)
                tokens += part * work.tokens
                requests += part * work.count
                own += part * work.tokens if undated.account.tenant == tenant else 0.0
        return WorkAhead(tokens, requests, own)

    def _examined(self, besides: str | None) -> list[tuple[UndatedBacklog, float]]:
        """Return tenants with requests without deadlines, each with the number of tenants that it stands for: a sample,
        where there are many. No tenant counts for more than its share, however long its backlog.
        """
        others = [undated for tenant, undated in self.undated.items() if tenant != besides]
        stride = max(1.0, len(others) / MAX_TENANTS_EXAMINED)
        return [(others[int(n * stride)], stride) for n in range(min(len(others), MAX_TENANTS_EXAMINED))]

    def behind(self, sequence: Sequence, due: float) -> list[DueRequest]:
        return self._offered(self.dated[bisect_right(self.dated, due, key=_DUE) :])

    def due_by(self, due: float) -> list[DueRequest]:
        """Return the waiting requests with deadlines due no later than `due`, in order, of tenants not on hold."""
        return self._offered(self.dated[: bisect_right(self.dated, due, key=_DUE)])

    def _offered(self, entries: list[DueRequest]) -> list[DueRequest]:
        """Return the entries of tenants not on hold: the end of a hold cannot be foreseen."""
        return [entry for entry in entries if entry.sequence.tenant not in self._held] if self._held else entries

    def ramp(self, account: Account) -> float:
        """Return a tenant's debt beyond `DEBT_TOLERANCE_S` as a share of `DEBT_RAMP_S`, from 0 to 1."""
        return max(0.0, min(1.0, (self.share.behind_best(account) - DEBT_TOLERANCE_S) / DEBT_RAMP_S))

    def makes_way_for(self, newcomer: Sequence, for_debts: bool, for_classes: bool) -> Callable[[Sequence], bool]:
        """Return a test of other requests: True if admission refuses the other rather than a newcomer, whose tenant is
        not in debt, because the other's tenant is (`for_debts`), or because it is of a lower class of the same tenant
        (`for_classes`): classes are no shares.
        """
        tenant, level, debtors = newcomer.tenant, newcomer.request.priority_class, dict[str, bool]()

        def makes_way(other: Sequence) -> bool:
            if other.tenant == tenant:
                return for_classes and other.request.priority_class > level
            if not for_debts:
                return False
            if other.tenant not in debtors:
                debtors[other.tenant] = self.ramp(self.share.account(other.tenant)) > 0.0
            return debtors[other.tenant]

        return makes_way


class WaitingOrder(WaitingQueue, ForecastOrder, Protocol):
    """An order of waiting requests, as the scheduler and the forecast use it."""

    def set_time(self, now: float) -> None:
        """Set the time, in seconds of the engine's clock."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...
