"""Measures how near the tenants' service comes to the bound stated by the order by due times."""

from collections.abc import Iterable

from admission.controller import Controller
from admission.order import DueOrder
from backend.scheduler.sequence import Sequence
from labs.simulation.statistics import ServiceGap


def gap_bound(weights: tuple[float, float], start_s: float, latest_s: float, ahead_s: float, run_up_s: float) -> float:
    """Return the most engine seconds, for each unit of weight, by which the service of two tenants differs over any
    interval in which both have requests without deadlines waiting: |W_i/w_i - W_j/w_j|.

    `start_s`: the largest difference of two tenants' credits. `latest_s`: the largest offset of a
    class, 0 for tenants in one class. `ahead_s`: seconds that a tenant has prepaid for prompts and not used yet.
    `run_up_s`: seconds that a tenant spends between two choices of its requests.

    While i is chosen rather than j, credit_i >= credit_j - latest_s / W, W >= w_i + w_j being the weight of all asking
    tenants; afterwards i spends at most the run-up. Grants are the same for both while both have work waiting. So the
    difference of credits moves between -(latest_s / W + run_up_s / w_i) and the same for j, or from its value when the
    later backlog began, at most `start_s`; service is grants less credit less prepaid seconds.
    """
    one, other = weights
    first = max(start_s, latest_s / (one + other) + run_up_s / min(one, other))
    return first + latest_s / (one + other) + (run_up_s + ahead_s) * (1 / one + 1 / other)


class FairnessMonitor:
    """Follows a core whose requests have no deadlines. It has to be notified of each plan and completion, and of
    anything else that ends a sequence.

    Terms of the bound are as in `gap_bound`, each the largest that was seen.
    """

    def __init__(self, core: Controller) -> None:
        assert isinstance(core.order, DueOrder)
        self.order, self.share, self._ledger = core.order, core.share, core.ledger
        self.most_ahead_s = 0.0  # paid ahead by a tenant
        self.most_run_up_s = 0.0  # spent by a tenant since it was last chosen
        self.latest_s = 0.0  # the largest offset of the classes of begun requests
        self._gap = ServiceGap()
        self._spent: dict[str, float] = {}  # by tenant, before the present event
        self._spent_before: dict[str, float] = {}  # when it was last chosen
        self._names: list[str] = []
        self._backlogs: list[object] = []

    def planned(self, admitted: Iterable[Sequence]) -> None:
        """Record a planned step that admits these sequences."""
        for sequence in admitted:
            self._spent_before[sequence.tenant] = self._spent.get(sequence.tenant, 0.0)
            self.latest_s = max(self.latest_s, self.order.aging[sequence.request.priority_class])
        self.update()

    def completed(self) -> None:
        """Record that the oldest step was completed, or lost, and its charges corrected."""
        self.update()
        accounts = self.share.accounts
        self._names += [tenant for tenant in accounts if tenant not in self._names]
        undated = self.order.undated
        backlogs = [undated.get(tenant) if accounts[tenant].is_waiting else None for tenant in self._names]
        before = self._backlogs + [None] * (len(backlogs) - len(self._backlogs))
        same = [now is not None and now is then for now, then in zip(backlogs, before, strict=True)]
        self._gap.observe([accounts[tenant].served for tenant in self._names], same)
        self._backlogs = list(backlogs)

    def update(self) -> None:
        """Record each tenant's advance payment now, and its spending since it was last chosen."""
        prepaid = self._prepaid()
        for tenant in self.share.accounts:
            self.most_ahead_s = max(self.most_ahead_s, prepaid.get(tenant, 0.0))
            self._spent[tenant] = spent = self.share.account(tenant).charged + prepaid.get(tenant, 0.0)
            self.most_run_up_s = max(self.most_run_up_s, spent - self._spent_before.get(tenant, 0.0))

    @property
    def gap(self) -> float:
        """The largest difference in service by weight between two tenants, over all intervals of both's backlog."""
        return self._gap.largest

    @property
    def bound(self) -> float:
        """The bound on the gap between the two lightest tenants."""
        weights = sorted(account.weight for account in self.share.accounts.values())
        if len(weights) < 2:
            return 0.0
        spread_s = self.share.burst_s + self.share.debt_limit_s
        return gap_bound((weights[0], weights[1]), spread_s, self.latest_s, self.most_ahead_s, self.most_run_up_s)

    def check(self) -> None:
        assert self.gap <= self.bound * (1 + 1e-9), f"the service gap {self.gap} exceeds its bound {self.bound}"

    def _prepaid(self) -> dict[str, float]:
        paid = dict[str, float]()
        for sequence, promise in self._ledger.promises.items():
            paid[sequence.tenant] = paid.get(sequence.tenant, 0.0) + promise.prepaid
        return paid
