"""Deficit round robin over tenants, paid after the fact, with aging classes inside a tenant and a limit on debt.

Shreedhar and Varghese (1995), for a server that learns a cost only when the work is done: every round grants a tenant
`quantum * weight`, work is charged as it is planned and corrected when it is measured, and a tenant in debt is passed
over until its grants have paid for it.

Two kinds of work may be admitted on credit. Urgent work may overtake a lower class while its tenant's debt is less than
`debt_limit`. And a turn that comes a little later makes nobody poorer, but late who has a deadline: so of all with
pressing deadlines the one that is due first (see `Aging.due`) goes before the one whose turn it is, if that is due
later and while the debt of its tenant is less than `deadline_debt_limit`.

Bound. Over any interval in which tenants i and j both have work waiting and are not held,

    |W_i / w_i - W_j / w_j|  <=  3 Q + (1 / w_i + 1 / w_j) (P + M + B)

with W the service of completed steps, w the weights as the queue uses them (at most 1), Q the quantum, P the most that
one tenant has paid ahead at a time (what its running sequences prepaid and have not used, and its part of the steps in
flight), M the most that it runs up between two of its admissions beyond what was paid ahead, and B the larger of the
two limits on debt. For credit is at most Q * w at a grant and above -B at an admission; in between, service takes
it down by what was not paid ahead; and both get the same grants. Of 3 Q, one is for a tenant that was idle for a part
of the interval: its service exceeds that of one which was not by no more.
"""

from collections import abc
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import floor, inf

from admission.aging import Aging
from admission.orderings.deficit_account import DeficitAccount
from admission.orderings.elsewhere import DebtsElsewhere
from admission.orderings.ordering import EnoughForAll, FairShares, weight_of
from admission.orderings.ring import Ring, Turn
from admission.orderings.tenant_queue import OrderInTenant, Place, TenantQueue
from backend.scheduler.sequence import Sequence

URGENT = 0  # the class that may overtake a lower one on credit
STALE = 10
"""Quanta that one replica serves before others learn of it: half a second of engine time by default."""


def gap_bound(
    quantum: float, weights: tuple[float, float], ahead: float, run_up: float, debt_limit: float = 0.0
) -> float:
    """Returns the bound above, in the unit of account; `ahead` is P, `run_up` is M, and `debt_limit` is B."""
    first, second = weights
    return 3 * quantum + (1 / first + 1 / second) * (ahead + run_up + debt_limit)


class FairQueue:
    """A `WaitingQueue` over tenants.

    Rounds are counted, not walked: each grants every tenant with work waiting `quantum * weight`, exactly once, and a
    new one begins only when nobody has credit left. So a head that is blocked on memory gets nothing for being looked
    at, a lone tenant never waits, and finding the next tenant costs O(log tenants). Within a round those with credit
    take turns by admissions, so that what one was granted, or is paid back, never makes another wait for all of it.
    Idle tenants keep debt, and credit until the round it was granted in ends. Weights count relative to the heaviest,
    which is granted the quantum, so that only their ratios matter; a tenant without one weighs 1.

    Urgent work (class 0) goes on credit only where the turn is of a lower class. The order of deadlines
    costs O(log tenants) for each sequence that comes or goes; at a limit of 0 there is none.
    """

    def __init__(
        self,
        quantum: float,
        aging: Aging,
        weights: Mapping[str, float] | None = None,
        debt_limit: float = 0.0,
        deadline_debt_limit: float = 0.0,
        order: OrderInTenant | None = None,
    ) -> None:
        """The quantum and the limits are in the unit of account; `order` is that of each tenant's sequences, by class
        and age unless it is given. Raises `ValueError`.
        """
        if not (quantum > 0 and debt_limit >= 0 and deadline_debt_limit >= 0):
            given = f"{quantum}, {debt_limit} and {deadline_debt_limit}"
            raise ValueError(f"quantum must be above 0 and limits on debt at least 0, got {given}")
        self.round = 1
        self.accounts: dict[str, DeficitAccount] = {}
        self._quantum, self._order = quantum, order or OrderInTenant(aging)
        self._debt_limit, self.deadline_debt_limit = debt_limit, deadline_debt_limit
        self._set_weights(weights or {})
        self._num_waiting, self._now = 0, 0.0
        self.shares: FairShares = EnoughForAll()
        self._charged: set[str] = set()  # since the last `take_charged`
        self._elsewhere = DebtsElsewhere(quantum, STALE * quantum + max(debt_limit, deadline_debt_limit))
        self.prepaid: dict[Sequence, float] = {}  # and not used yet, by sequences that were admitted and have not ended
        self._ring, self._urgent = Ring(), Ring()
        self._by_deadline: list[
            tuple[Place, str]
        ] = []  # heap; an entry that is no tenant's first leaves when it surfaces
        self._debtors: list[tuple[int, str]] = []  # heap of tenants too far in debt, by the round in which that ends
        self._debtor_until: dict[str, int] = {}  # the valid entry of each of them
        self._counter = count(1)

    # waiting

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, sequence: Sequence) -> None:
        account = self._account(sequence.tenant)
        if account.num_waiting == 0:
            self._activate(account)
        account.waiting.add(sequence, next(self._counter))
        self._num_waiting += 1
        self._list(account)
        self._list_by_due(account)

    def restore(self, sequence: Sequence) -> None:
        """Take back a preempted sequence, with its arrival, hence its place among its tenant's, and what it prepaid."""
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        account = self.accounts[sequence.tenant]
        if account.num_waiting == 1:
            self._leave_ring(account)
        account.waiting.remove(sequence, self._now)
        self._num_waiting -= 1
        if account.num_waiting:
            if self._debt_limit:
                self._list(account)  # urgent work may be first now
            self._list_by_due(account)

    def head(self) -> Sequence | None:
        """Returns the next to be admitted, None when nobody may be; the same until something changes."""
        choice = self._by_turn()
        if choice is None or not (self._by_deadline or self._debtors):
            return choice
        account = self.accounts[choice.tenant]
        if self._credit(account) <= -self.deadline_debt_limit:
            return choice  # urgent work that goes first on more credit
        self._forgive()
        pressing = self._most_pressing()
        if pressing is not None and self.outranks(choice, pressing[1]):
            return choice
        place = self._first_place(account)
        return choice if pressing is None or (place is not None and place < pressing[0]) else pressing[1]

    def _by_turn(self) -> Sequence | None:
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
        """Skip a tenant, without grants, for a limit of its own that it has met; None: it is skipped no more."""
        account = self._account(tenant)
        if reason is not None and account.held is None:
            self._leave_ring(account)
        was_held, account.held = account.held, reason
        if reason is None and was_held is not None and account.num_waiting:
            self._activate(account)
            self._list(account)
        if reason is None:
            self._list_by_due(account)

    def at(self, now: float) -> None:
        self._now = now

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        """Weigh and age so from now on. Rounds that are over were granted by the old weights; places are kept."""
        self._order.age(aging)
        self._set_weights(weights)
        self._debtors, self._debtor_until = [], {}
        for account in self.accounts.values():
            account.credit, account.round = self._credit(account), max(account.round, self.round)
            account.weight = self._weight(account.tenant)
            if account.num_waiting:
                self._list(account)
                self._list_by_due(account)

    # paying

    def prepay(self, sequence: Sequence, cost: float) -> None:
        account = self._account(sequence.tenant)
        account.turn = next(self._counter)
        self.prepaid[sequence] = cost
        self._spend(account, cost)

    def charge(self, sequences: abc.Sequence[Sequence], costs: abc.Sequence[float]) -> Mapping[str, float]:
        """Charge a step; what a sequence prepaid pays first, and its tenant pays the rest."""
        sums: dict[str, float] = {}
        prepaid, sum_of, prepaid_by = self.prepaid, sums.get, self.prepaid.get
        for sequence, cost in zip(sequences, costs):  # noqa: B905 - being strict takes as long as ten rows
            tenant = sequence.tenant
            sums[tenant] = sum_of(tenant, 0.0) + cost
            rest = prepaid_by(sequence, 0.0) - cost
            if rest >= 0.0:
                prepaid[sequence] = rest
            else:
                prepaid[sequence] = 0.0
                self.accounts[tenant].credit += rest
        self._charged.update(sums)
        for tenant, cost in sums.items():
            account = self.accounts[tenant]
            account.charged += cost
            account.served += cost / account.weight
        return sums

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        for tenant, cost in costs:
            self._charged.add(tenant)
            account = self.accounts[tenant]
            account.charged += cost
            account.served += cost / account.weight
            self._spend(account, cost)

    def take_charged(self) -> dict[str, float]:
        """Returns what each tenant was charged in all, of those that were charged since the last call."""
        tenants, self._charged = self._charged, set()
        return {tenant: self.accounts[tenant].charged for tenant in tenants}

    def served_elsewhere(self, costs: Mapping[str, float], replicas: int) -> None:
        """Charge tenants for what others of so many replicas have served them lately (see `DebtsElsewhere`)."""
        someone_waits = self._ring.first(self._due) is not None
        for tenant in costs:
            self._account(tenant)
        new = costs if someone_waits else {}
        for account, change in self._elsewhere.charge(self.accounts, new, self.round, replicas):
            self._spend(account, -change)

    def settle(self, sequence: Sequence) -> None:
        rest = self.prepaid.pop(sequence, 0.0)
        if rest:
            self._spend(self.accounts[sequence.tenant], -rest)
        if self._debtor_until.pop(sequence.tenant, None) is not None:
            self._list_by_due(self.accounts[sequence.tenant])

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        """Returns whether it is served before another whatever is due when: its tenant is within its share, and the
        other's beyond its own, and has left it the time (see `reserve`). What has a deadline goes by that: it is in
        time for what was left to it, and nobody's promise is broken for it.
        """
        is_patient = not sequence.is_pressing
        return is_patient and self.shares.is_beyond(other.tenant) and self.shares.is_within(sequence.tenant)

    def account(self, tenant: str) -> DeficitAccount:
        """Returns the tenant's account, which begins with this if it has none."""
        return self._account(tenant)

    def credit(self, tenant: str) -> float:
        return self._credit(self._account(tenant))

    def rounds_before(self, tenant: str, cost: float) -> int:
        """Returns the rounds until the tenant has paid `cost` for others of its own and has credit again."""
        account = self.accounts.get(tenant)
        share = self._quantum * (account.weight if account else self._weight(tenant))
        credit = self._credit(account) if account else 0.0
        if account is None or not account.num_waiting:
            credit = min(credit, 0.0) + share
        return max(0, floor((cost - credit) / share) + 1)

    def credits_after(self, tenants: Iterable[str], rounds: int) -> list[float]:
        """Returns the credits that tenants with work waiting will have so many rounds on; -inf of those on hold."""
        quantum, end = self._quantum, self.round + rounds
        accounts = [self.accounts[tenant] for tenant in tenants]
        return [-inf if a.held is not None else a.credit + (end - a.round) * quantum * a.weight for a in accounts]

    # turns

    def _account(self, tenant: str) -> DeficitAccount:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = DeficitAccount(tenant, self._weight(tenant), TenantQueue(self._order))
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
        if account.credit < 0 and self.shares.is_within(account.tenant):
            account.credit = 0.0  # it has asked for less than its share since
            self._elsewhere.forgive(account.tenant)
        account.round = max(account.round, self.round - 1)
        account.backlog_id = account.turn = next(self._counter)

    def _leave_ring(self, account: DeficitAccount) -> None:
        """Take the grants up to this round along: what leaves it may be an admission, which they are to pay for."""
        account.credit, account.round = self._credit(account), self.round

    def _credit(self, account: DeficitAccount) -> float:
        """Returns the credit as of this round, which grants only tenants in the ring."""
        if account.num_waiting == 0 or account.held is not None:
            return account.credit
        return account.credit + (self.round - account.round) * self._quantum * account.weight

    def _spend(self, account: DeficitAccount, cost: float) -> None:
        before = account.credit
        account.credit = after = before - cost
        if cost < 0 and before <= 0 and account.num_waiting and self._is_due_earlier(account, before, after):
            self._list(account)

    def _is_due_earlier(self, account: DeficitAccount, before: float, after: float) -> bool:
        """Returns whether more credit brings the tenant's turn, or its urgent work's, forward by a round."""
        share, limit = self._quantum * account.weight, self._debt_limit
        return floor(-before / share) > floor(-after / share) or (
            limit > 0 and floor(-(before + limit) / share) > floor(-(after + limit) / share)
        )

    def _list(self, account: DeficitAccount) -> None:
        if account.held is None:
            self._ring.list(account.tenant, self._next_turn(account, 0.0))
            if self._debt_limit and self._first_of(account).priority_class == URGENT:
                self._urgent.list(account.tenant, self._next_turn(account, self._debt_limit))

    def _next_turn(self, account: DeficitAccount, debt_limit: float) -> Turn:
        """Returns the first turn, in this round or later, at which the tenant's debt is below the limit."""
        if account.credit + self._debt_limit > 0 and self.shares.is_within(account.tenant):
            return self.round - 1, account.turn  # before those who are beyond theirs
        due = account.round
        lacking = -(account.credit + debt_limit)
        if lacking >= 0:
            due += floor(lacking / (self._quantum * account.weight)) + 1
        return max(due, self.round), account.turn

    def _due(self, tenant: str) -> Turn | None:
        account = self.accounts[tenant]
        return self._next_turn(account, 0.0) if account.num_waiting and account.held is None else None

    def _urgent_due(self, tenant: str) -> Turn | None:
        account = self.accounts[tenant]
        if not account.num_waiting or account.held is not None or self._first_of(account).priority_class != URGENT:
            return None
        return self._next_turn(account, self._debt_limit)

    def _first_of(self, account: DeficitAccount) -> Sequence:
        """Returns the first of the tenant's, which has some waiting."""
        first = account.waiting.first(self._now)
        assert first is not None, "it has work waiting"
        return first

    # the order of deadlines

    def _first_place(self, account: DeficitAccount) -> Place | None:
        """Returns the place of the tenant's first sequence; None when it has none that may be admitted."""
        if not account.num_waiting or account.held is not None:
            return None
        return account.waiting.first_place(self._now)

    def _list_by_due(self, account: DeficitAccount) -> None:
        """List the tenant's first sequence, unless it has no pressing deadline or its tenant is too far in debt."""
        if not self.deadline_debt_limit or account.tenant in self._debtor_until:
            return
        place = self._first_place(account)
        if place is not None and self._first_of(account).is_pressing:
            heappush(self._by_deadline, (place, account.tenant))

    def _most_pressing(self) -> tuple[Place, Sequence] | None:
        """Returns the most pressing of tenants whose debt is within the limit, and its place."""
        while self._by_deadline:
            place, tenant = self._by_deadline[0]
            account = self.accounts[tenant]
            is_first = tenant not in self._debtor_until and self._first_place(account) == place
            if is_first and self._credit(account) > -self.deadline_debt_limit:
                return place, self._first_of(account)
            heappop(self._by_deadline)
            if is_first:
                self._set_aside(account)
        return None

    def _set_aside(self, account: DeficitAccount) -> None:
        """Leave a tenant that is too far in debt out of the order of deadlines until its grants have paid for it."""
        lacking = -self._credit(account) - self.deadline_debt_limit
        due = self.round + floor(lacking / (self._quantum * account.weight)) + 1
        self._debtor_until[account.tenant] = due
        heappush(self._debtors, (due, account.tenant))

    def _forgive(self) -> None:
        """List those again that were too far in debt and no longer are."""
        while self._debtors and self._debtors[0][0] <= self.round:
            due, tenant = heappop(self._debtors)
            if self._debtor_until.get(tenant) == due:
                del self._debtor_until[tenant]
                self._list_by_due(self.accounts[tenant])
