"""Who is admitted next among tenants: deficit round robin, paid after the fact, with aging classes inside a tenant.

Shreedhar and Varghese (1995), for a server that learns a cost only when the work is done: every visit grants a tenant
`quantum * weight`, work is charged as it is planned and corrected when it is measured, and a tenant in debt is passed
over until its grants have paid for it.

Bound. Over any interval in which tenants i and j both have work waiting,

    |W_i / w_i - W_j / w_j|  <=  3 Q + 2 (L + M) + depth * S

with W the service charged, w the weights, Q the quantum, L the largest cost one admission prepays, M the largest cost
that the sequences running for one tenant can still run up beyond what they prepaid, and S the largest step, of which
`depth` are planned before they are measured. Urgent work that borrows adds the credit it may borrow.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor

from admission.aging import Aging
from backend.sequence import Sequence

URGENT = 0  # the class that may borrow


@dataclass(slots=True)
class Account:
    """One tenant's standing. Costs are in the unit of account: seconds of engine time, or tokens."""

    tenant: str
    weight: float
    credit: float = 0.0  # negative when in debt; grants of the rounds after `round` are not in it yet
    round: int = 0
    charged: float = 0.0  # all it ever used
    order: int = 0  # its place in the ring, by when it last had nothing waiting
    waiting: list[tuple[float, int, Sequence]] = field(default_factory=list)  # heap; cancelled ones leave it lazily
    num_waiting: int = 0
    held: str | None = None  # a limit of its own that keeps it out of the ring


class _Ring:
    """Tenants by the round in which their credit, with what they may borrow, rises above 0."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []  # (round, order, tenant); an entry may be too early, never too late
        self._listed: dict[str, int] = {}  # the earliest round a tenant is in the heap with

    def list(self, account: Account, due: int) -> None:
        """See to it that the tenant is looked at no later than round `due`."""
        if due < self._listed.get(account.tenant, due + 1):
            self._listed[account.tenant] = due
            heappush(self._heap, (due, account.order, account.tenant))

    def first(self, due: Callable[[str], int | None]) -> tuple[int, str] | None:
        """Who is due first, in round and ring order; `due` tells a tenant's round, None when it is out of the ring."""
        while self._heap:
            listed, order, tenant = self._heap[0]
            actual = due(tenant) if self._listed.get(tenant) == listed else None
            if actual == listed:
                return listed, tenant
            heappop(self._heap)
            if self._listed.get(tenant) == listed:
                del self._listed[tenant]
                if actual is not None:
                    self._listed[tenant] = actual
                    heappush(self._heap, (actual, order, tenant))
        return None


class FairQueue:
    """A `WaitingQueue` over tenants.

    Rounds are counted, not walked: each grants every tenant with work waiting `quantum * weight`, exactly once, and a
    new one begins only when nobody has credit left. So a head that is blocked on memory gets nothing for being looked
    at, a lone tenant never waits, and finding the next tenant costs O(log tenants). Idle tenants lose credit and keep
    debt. Urgent work (class 0) may be admitted while its tenant is less than `borrow` in debt.
    """

    def __init__(
        self, quantum: float, aging: Aging, weights: Mapping[str, float] | None = None, borrow: float = 0.0
    ) -> None:
        if not (quantum > 0 and borrow >= 0):
            raise ValueError(f"quantum must be above 0 and borrow at least 0, got {quantum} and {borrow}")
        self.round = 1
        self.accounts: dict[str, Account] = {}
        self._quantum = quantum
        self._borrow = borrow
        self._aging = aging
        self._weights = dict(weights or {})
        self._waiting: set[Sequence] = set()
        self._prepaid: dict[Sequence, float] = {}  # of sequences that were admitted and have not ended
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
        key = self._aging.key(sequence.arrival, sequence.priority_class)
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

    def head(self) -> Sequence | None:
        """The next to be admitted; the same until something changes."""
        urgent = self._urgent.first(self._urgent_due)
        if urgent is not None and urgent[0] <= self.round:
            return self._first_of(self.accounts[urgent[1]])
        first = self._ring.first(self._due)
        if first is None:
            return None
        self.round = max(self.round, first[0])
        return self._first_of(self.accounts[first[1]])

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

    # paying

    def prepay(self, sequence: Sequence, cost: float) -> None:
        self._prepaid[sequence] = cost
        self._spend(self._account(sequence.tenant), cost)

    def charge(self, sequences: Many[Sequence], costs: Many[float]) -> Mapping[str, float]:
        """Prepaid credit pays first; the rest is the tenant's."""
        sums: dict[str, float] = {}
        prepaid = self._prepaid
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
        rest = self._prepaid.pop(sequence, 0.0)
        if rest:
            self._spend(self.accounts[sequence.tenant], -rest)

    def standing(self, tenant: str) -> float:
        return self._credit(self._account(tenant))

    # inside

    def _account(self, tenant: str) -> Account:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account(tenant, self._weights.get(tenant, 1.0))
        return account

    def _activate(self, account: Account) -> None:
        """Join the ring's end in this round, with its grant unless it had that already; credit from before is lost."""
        account.credit = min(account.credit, 0.0)
        account.round = max(account.round, self.round - 1)
        account.order = next(self._counter)

    def _leave_ring(self, account: Account) -> None:
        """Take the grants up to this round along: what leaves it may be an admission, which they are to pay for."""
        account.credit, account.round = self._credit(account), self.round

    def _credit(self, account: Account) -> float:
        """As of this round, which grants only tenants in the ring."""
        if account.num_waiting == 0 or account.held is not None:
            return account.credit
        return account.credit + (self.round - account.round) * self._quantum * account.weight

    def _spend(self, account: Account, cost: float) -> None:
        account.credit -= cost
        if cost < 0 and account.num_waiting:
            self._list(account)

    def _list(self, account: Account) -> None:
        if account.held is None:
            self._ring.list(account, self._round_of_credit(account, 0.0))
            if self._borrow and self._first_of(account).priority_class == URGENT:
                self._urgent.list(account, self._round_of_credit(account, self._borrow))

    def _round_of_credit(self, account: Account, borrowed: float) -> int:
        """The first round in which credit and `borrowed` together are above 0."""
        lacking = -(account.credit + borrowed)
        if lacking < 0:
            return account.round
        return account.round + floor(lacking / (self._quantum * account.weight)) + 1

    def _due(self, tenant: str) -> int | None:
        account = self.accounts[tenant]
        in_ring = account.num_waiting and account.held is None
        return self._round_of_credit(account, 0.0) if in_ring else None

    def _urgent_due(self, tenant: str) -> int | None:
        account = self.accounts[tenant]
        if not account.num_waiting or account.held is not None or self._first_of(account).priority_class != URGENT:
            return None
        return self._round_of_credit(account, self._borrow)

    def _first_of(self, account: Account) -> Sequence:
        """The first of the tenant's that is still waiting."""
        while account.waiting[0][2] not in self._waiting:
            heappop(account.waiting)
        return account.waiting[0][2]
