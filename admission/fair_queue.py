"""Who is admitted next among tenants: deficit round robin, paid after the fact, with aging classes inside a tenant.

Shreedhar and Varghese (1995), for a server that learns a cost only when the work is done: every visit grants a tenant
`quantum * weight`, work is charged as it is planned and corrected when it is measured, and a tenant in debt is passed
over until its grants have paid for it.

Bound. Over any interval in which tenants i and j both have work waiting and are not held,

    |W_i / w_i - W_j / w_j|  <=  3 Q + (1 / w_i + 1 / w_j) (P + M + B)

with W the service of completed steps, w the weights as the queue uses them (at most 1), Q the quantum, P the most that
one tenant has paid ahead at a time (what its running sequences prepaid and have not used, and its part of the steps in
flight), M the most that it runs up between two of its admissions beyond what was paid ahead, and B the credit that
urgent work may borrow. For credit is at most Q * w at a grant and above -B at an admission; in between, service takes
it down by what was not paid ahead; and both get the same grants. Of 3 Q, one is for a tenant that was idle for a part
of the interval: its service exceeds that of one which was not by no more.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import floor

from admission.aging import Aging
from admission.orderings.ordering import weight_of
from backend.scheduler.sequence import Sequence

URGENT = 0  # the class that may borrow


def gap_bound(quantum: float, weights: tuple[float, float], ahead: float, run_up: float, borrow: float = 0.0) -> float:
    """Bound on the gap in service by weight of two tenants, in the unit of account; `ahead` is P, `run_up` is M."""
    first, second = weights
    return 3 * quantum + (1 / first + 1 / second) * (ahead + run_up + borrow)


@dataclass(slots=True)
class DeficitAccount:
    """What one tenant has and owes. Costs are in the unit of account: seconds of engine time, or tokens."""

    tenant: str
    weight: float  # relative to the heaviest tenant's
    credit: float = 0.0  # negative when in debt; grants of the rounds after `round` are not in it yet
    round: int = 0
    charged: float = 0.0  # all it ever used
    order: int = 0  # changes whenever work begins to wait
    turn: int = 0  # its place in the ring: behind everyone when work begins to wait, and after each admission
    waiting: list[tuple[float, int, Sequence]] = field(default_factory=list)  # heap; cancelled ones leave it lazily
    num_waiting: int = 0
    held: str | None = None  # a limit of its own that keeps it out of the ring


_Place = tuple[int, int]
"""A round and a turn in it."""


class _Ring:
    """Tenants by the round in which their credit, with what they may borrow, rises above 0, and by turns in a round."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Place, str]] = []  # a place may be too early, never too late
        self._listed: dict[str, _Place] = {}  # the earliest that a tenant is in the heap with

    def list(self, tenant: str, place: _Place) -> None:
        """See to it that the tenant is looked at no later than at this place."""
        if tenant not in self._listed or place < self._listed[tenant]:
            self._listed[tenant] = place
            heappush(self._heap, (place, tenant))

    def first(self, find: Callable[[str], _Place | None]) -> tuple[int, str] | None:
        """Who is first, and in which round; `find` tells a tenant's place, None when it is out of the ring."""
        while self._heap:
            place, tenant = self._heap[0]
            actual = find(tenant) if self._listed.get(tenant) == place else None
            if actual == place:
                return place[0], tenant
            heappop(self._heap)
            if self._listed.get(tenant) == place:
                del self._listed[tenant]
                if actual is not None:
                    self.list(tenant, actual)
        return None


class FairQueue:
    """A `WaitingQueue` over tenants.

    Rounds are counted, not walked: each grants every tenant with work waiting `quantum * weight`, exactly once, and a
    new one begins only when nobody has credit left. So a head that is blocked on memory gets nothing for being looked
    at, a lone tenant never waits, and finding the next tenant costs O(log tenants). Within a round those with credit
    take turns by admissions, so that what one was granted, or is paid back, never makes another wait for all of it.
    Idle tenants keep debt, and credit until the round it was granted in ends. Weights count relative to the heaviest,
    which is granted the quantum, so that only their ratios matter; a tenant without one weighs 1. Urgent work (class 0)
    may go before another tenant's turn while its own tenant is less than `borrow` in debt, unless that turn is urgent
    work as well: credit is borrowed only to overtake a lower class.
    """

    def __init__(
        self, quantum: float, aging: Aging, weights: Mapping[str, float] | None = None, borrow: float = 0.0
    ) -> None:
        if not (quantum > 0 and borrow >= 0):
            raise ValueError(f"quantum must be above 0 and borrow at least 0, got {quantum} and {borrow}")
        self.round = 1
        self.accounts: dict[str, DeficitAccount] = {}
        self._quantum = quantum
        self._borrow = borrow
        self._aging = aging
        self._set_weights(weights or {})
        self._waiting: set[Sequence] = set()
        self.prepaid: dict[Sequence, float] = {}  # and not used yet, by sequences that were admitted and have not ended
        self._ring, self._urgent = _Ring(), _Ring()
        self._counter = count(1)

    # waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        account = self._account(sequence.tenant)
        if account.num_waiting == 0:
            self._activate(account)
        account.num_waiting += 1
        self._waiting.add(sequence)
        key = self._aging.key(sequence.arrival - sequence.age_bonus, sequence.priority_class)
        heappush(account.waiting, (key, next(self._counter), sequence))
        self._list(account)

    def restore(self, sequence: Sequence) -> None:
        """It keeps its arrival, hence its place among its tenant's, and what it has prepaid."""
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        account = self.accounts[sequence.tenant]
        if account.num_waiting == 1:
            account.waiting.clear()
            self._leave_ring(account)
        account.num_waiting -= 1
        if len(account.waiting) > 2 * account.num_waiting + 64:
            account.waiting = [entry for entry in account.waiting if entry[2] in self._waiting]
            heapify(account.waiting)
        if account.num_waiting and self._borrow:
            self._list(account)  # urgent work may be first now

    def head(self) -> Sequence | None:
        """The next to be admitted; the same until something changes."""
        first = self._ring.first(self._due)
        if first is None:
            return None
        sequence = self._first_of(self.accounts[first[1]])
        if sequence.priority_class != URGENT:
            urgent = self._urgent.first(self._urgent_due)
            if urgent is not None and urgent[0] <= self.round:
                return self._first_of(self.accounts[urgent[1]])
        self.round = max(self.round, first[0])
        return sequence

    def hold(self, tenant: str, reason: str | None) -> None:
        """Pass a tenant over for a limit of its own, without grants, until it is held for None."""
        account = self._account(tenant)
        if reason is not None and account.held is None:
            self._leave_ring(account)
        was_held, account.held = account.held, reason
        if reason is None and was_held is not None and account.num_waiting:
            self._activate(account)
            self._list(account)

    def at(self, now: float) -> None:
        pass

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        """Rounds that are over were granted by the old weights; those who wait already keep their places."""
        self._aging = aging
        self._set_weights(weights)
        for account in self.accounts.values():
            account.credit, account.round = self._credit(account), max(account.round, self.round)
            account.weight = self._weight(account.tenant)
        for account in self.accounts.values():
            if account.num_waiting:
                self._list(account)

    # paying

    def prepay(self, sequence: Sequence, cost: float) -> None:
        account = self._account(sequence.tenant)
        account.turn = next(self._counter)
        self.prepaid[sequence] = cost
        self._spend(account, cost)

    def charge(self, sequences: Many[Sequence], costs: Many[float]) -> Mapping[str, float]:
        """Prepaid credit pays first; the rest is the tenant's."""
        sums: dict[str, float] = {}
        prepaid = self.prepaid
        for sequence, cost in zip(sequences, costs, strict=True):
            tenant = sequence.tenant
            sums[tenant] = sums.get(tenant, 0.0) + cost
            credit = prepaid.get(sequence, 0.0)
            if credit >= cost:
                prepaid[sequence] = credit - cost
            else:
                prepaid[sequence] = 0.0
                self.accounts[tenant].credit -= cost - credit
        for tenant, cost in sums.items():
            self.accounts[tenant].charged += cost
        return sums

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        for tenant, cost in costs:
            account = self.accounts[tenant]
            account.charged += cost
            self._spend(account, cost)

    def settle(self, sequence: Sequence) -> None:
        rest = self.prepaid.pop(sequence, 0.0)
        if rest:
            self._spend(self.accounts[sequence.tenant], -rest)

    def credit(self, tenant: str) -> float:
        return self._credit(self._account(tenant))

    # inside

    def _account(self, tenant: str) -> DeficitAccount:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = DeficitAccount(tenant, self._weight(tenant))
        return account

    def _set_weights(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._heaviest = max([*self._weights.values(), weight_of("", self._weights)])

    def _weight(self, tenant: str) -> float:
        return weight_of(tenant, self._weights) / self._heaviest

    def _activate(self, account: DeficitAccount) -> None:
        """Join the ring in this round, with its grant or what is left of it; credit from earlier rounds is lost."""
        left = self._quantum * account.weight if account.round == self.round else 0.0
        account.credit = min(account.credit, left)
        account.round = max(account.round, self.round - 1)
        account.order = account.turn = next(self._counter)

    def _leave_ring(self, account: DeficitAccount) -> None:
        """Take the grants up to this round along: what leaves it may be an admission, which they are to pay for."""
        account.credit, account.round = self._credit(account), self.round

    def _credit(self, account: DeficitAccount) -> float:
        """As of this round, which grants only tenants in the ring."""
        if account.num_waiting == 0 or account.held is not None:
            return account.credit
        return account.credit + (self.round - account.round) * self._quantum * account.weight

    def _spend(self, account: DeficitAccount, cost: float) -> None:
        before = account.credit
        account.credit = after = before - cost
        if cost < 0 and before <= 0 and account.num_waiting and self._is_due_earlier(account, before, after):
            self._list(account)

    def _is_due_earlier(self, account: DeficitAccount, before: float, after: float) -> bool:
        """Whether more credit brings the tenant's turn, or that of its urgent work, forward by a round."""
        share, borrow = self._quantum * account.weight, self._borrow
        return floor(-before / share) > floor(-after / share) or (
            borrow > 0 and floor(-(before + borrow) / share) > floor(-(after + borrow) / share)
        )

    def _list(self, account: DeficitAccount) -> None:
        if account.held is None:
            self._ring.list(account.tenant, self._place(account, 0.0))
            if self._borrow and self._first_of(account).priority_class == URGENT:
                self._urgent.list(account.tenant, self._place(account, self._borrow))

    def _place(self, account: DeficitAccount, borrowed: float) -> _Place:
        """The first round, of this one and those to come, in which credit and `borrowed` together are above 0."""
        due = account.round
        lacking = -(account.credit + borrowed)
        if lacking >= 0:
            due += floor(lacking / (self._quantum * account.weight)) + 1
        return max(due, self.round), account.turn

    def _due(self, tenant: str) -> _Place | None:
        account = self.accounts[tenant]
        in_ring = account.num_waiting and account.held is None
        return self._place(account, 0.0) if in_ring else None

    def _urgent_due(self, tenant: str) -> _Place | None:
        account = self.accounts[tenant]
        if not account.num_waiting or account.held is not None or self._first_of(account).priority_class != URGENT:
            return None
        return self._place(account, self._borrow)

    def _first_of(self, account: DeficitAccount) -> Sequence:
        """The first of the tenant's that is still waiting."""
        while account.waiting[0][2] not in self._waiting:
            heappop(account.waiting)
        return account.waiting[0][2]
