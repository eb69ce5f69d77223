"""Measures a fair queue from outside, by records of its own: how near its service comes to the stated bound."""

from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass

from admission.orderings.deficit_account import DeficitAccount
from admission.orderings.fair_queue import FairQueue, gap_bound
from backend.scheduler.sequence import Sequence
from labs.simulation.statistics import ServiceGap


@dataclass(slots=True)
class _ServiceRecord:
    """One tenant's service and payments, in the unit of account."""

    charged: float = 0.0  # as of the last update
    service: float = 0.0  # of completed steps
    ahead: float = 0.0  # paid and not served yet: prepayments, and its part of the steps in flight
    paid_for: float = 0.0  # service and what was paid ahead, just before its last admission
    backlog_id: int = 0  # of its account, which changes whenever a backlog begins


class FairnessMonitor:
    """Measures fairness. It has to be notified of each plan and completion, and of anything else that ends a sequence.

    Terms of the bound are as in `admission.orderings.fair_queue`, each the largest that was seen.
    """

    def __init__(self, queue: FairQueue, quantum: float, debt_limit: float) -> None:
        self.queue = queue
        self.quantum = quantum
        self.debt_limit = debt_limit
        self.most_ahead = 0.0
        self.most_run_up = 0.0
        self._gap = ServiceGap()
        self._grants = ServiceGap()
        self._records: dict[str, _ServiceRecord] = {}
        self._in_flight: deque[dict[str, float]] = deque()  # what was charged for each, by tenant

    def planned(self, admitted: Iterable[Sequence]) -> None:
        """Note that a step was planned which admits these."""
        for sequence in admitted:
            record = self._of(sequence.tenant)
            record.paid_for = record.service + record.ahead
        scheduled = {}
        for tenant, account in self.queue.accounts.items():
            record = self._of(tenant)
            if account.charged != record.charged:
                scheduled[tenant], record.charged = account.charged - record.charged, account.charged
        self._in_flight.append(scheduled)
        self.update()

    def completed(self) -> None:
        """Note that the oldest step was completed, and its charges corrected."""
        scheduled = self._in_flight.popleft()
        for tenant, account in self.queue.accounts.items():
            record = self._of(tenant)
            record.service += scheduled.get(tenant, 0.0) + account.charged - record.charged
            record.charged = account.charged
            self.most_run_up = max(self.most_run_up, record.service - record.paid_for)
        self.update()
        self._compare(list(self.queue.accounts.values()))

    def lost(self) -> None:
        """Note that none of the steps in flight took place."""
        self._in_flight.clear()
        for tenant, account in self.queue.accounts.items():
            self._of(tenant).charged = account.charged
        self.update()

    def update(self) -> None:
        """Measure what each tenant has paid ahead now."""
        ahead = dict.fromkeys(self.queue.accounts, 0.0)
        for sequence, prepaid in self.queue.prepaid.items():
            ahead[sequence.tenant] += prepaid
        for scheduled in self._in_flight:
            for tenant, cost in scheduled.items():
                ahead[tenant] += cost
        for tenant, paid in ahead.items():
            self._of(tenant).ahead = paid
        self.most_ahead = max(self.most_ahead, *ahead.values(), 0.0)

    @property
    def gap(self) -> float:
        """The largest difference in service by weight between two tenants, over all intervals of both's backlog."""
        return self._gap.largest

    @property
    def grants_gap(self) -> float:
        """The largest difference in grants, over the same intervals."""
        return self._grants.largest

    @property
    def bound(self) -> float:
        """The bound on the gap between the two lightest tenants."""
        weights = sorted(account.weight for account in self.queue.accounts.values())
        if len(weights) < 2:
            return 0.0
        return gap_bound(self.quantum, (weights[0], weights[1]), self.most_ahead, self.most_run_up, self.debt_limit)

    def check(self) -> None:
        assert self.gap <= self.bound * (1 + 1e-9), f"the service gap {self.gap} exceeds its bound {self.bound}"
        assert self.grants_gap <= 1 + 1e-6, f"grants differ by {self.grants_gap}"

    def _of(self, tenant: str) -> _ServiceRecord:
        record = self._records.get(tenant)
        if record is None:
            record = self._records[tenant] = _ServiceRecord()
        return record

    def _compare(self, accounts: abc.Sequence[DeficitAccount]) -> None:
        service, grants, backlogged = [], [], []
        for account in accounts:
            record = self._of(account.tenant)
            granted = self.queue.credit(account.tenant) + record.ahead + record.service
            service.append(record.service / account.weight)
            grants.append(granted / (self.quantum * account.weight))
            backlogged.append(
                account.num_waiting > 0 and account.held is None and account.backlog_id == record.backlog_id
            )
            record.backlog_id = account.backlog_id
        self._gap.observe(service, backlogged)
        self._grants.observe(grants, backlogged)
