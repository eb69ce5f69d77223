"""The scheduler's hooks, answered with knowledge of tenants and time."""

from collections.abc import Callable

from admission.kv.memory import FuturePeak, Gate
from admission.kv.swap_choice import SwapChoice
from admission.ledger import Ledger
from admission.order import DueOrder
from admission.prefill_sizer import PrefillSizer
from admission.spare import SpareSizer
from backend.scheduler.retention import Retention
from backend.scheduler.sequence import Sequence


class TenantHooks:
    """The `SchedulerHooks` that know tenants and time: prefill by latency targets, memory by forecast."""

    def __init__(
        self,
        due: Callable[[Sequence], float],
        ledger: Ledger,
        sizer: PrefillSizer,
        spare: SpareSizer,
        gate: Gate,
        forecast: FuturePeak,
        swap_choice: SwapChoice,
        retention: Retention | None,
        order: DueOrder | None,
    ) -> None:
        """`order`: gives tenants shares of slots and memory; None: they have none."""
        self.due = due
        self.prefill_budget = sizer.prefill_budget
        self.decode_seconds = sizer.decode_seconds
        self.draft_seconds = sizer.draft_seconds
        self.spare_step = spare.step
        self.swaps = swap_choice.swaps
        self.retention = retention
        self.admits: Gate = gate
        self.peak = forecast.blocks
        self.admitted = ledger.begun
        self._ledger, self._order = ledger, order

    def weight(self, tenant: str) -> float | None:
        return self._ledger.share.account(tenant).weight if self._order is not None else None

    def may_take(self, tenant: str, other: str) -> bool:
        """Return True if the tenant may take a slot or blocks of the other: its credit is at least as large. With less
        it would take the time that pays its debt. A difference within one grant is noise.
        """
        share = self._ledger.share
        return share.credit(share.account(tenant)) >= share.credit(share.account(other)) - share.grant_s

    def first_that(self, may: Callable[[str, int], bool]) -> Sequence | None:
        return None if self._order is None else self._order.first_that(may)
