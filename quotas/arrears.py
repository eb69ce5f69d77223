"""What was used while the store was away, until the store has charged it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quotas.account import Account
from quotas.replica import Replica, all_of
from quotas.reservation import NOTHING, Usage
from quotas.slice import Slice


@dataclass(slots=True)
class Debt:
    """Of one account; `parts` is what was spent from each slice."""

    ordinal: int
    used: Usage = NOTHING
    parts: dict[Slice, Usage] = field(default_factory=dict)


class Arrears:
    """One per process. However often a debt has to be sent, it is charged to the limits and booked once."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._names: dict[Account, bytes] = {}  # by which the store knows the debtor
        self._open: dict[Account, Debt] = {}
        self._sent: dict[Account, Debt] = {}  # perhaps charged: they no longer change
        self._ordinal = 0

    def add(self, account: Account, used: Usage, slices: Sequence[Slice]) -> None:
        if account not in self._open:
            self._ordinal += 1
            self._open[account] = Debt(self._ordinal)
        debt = self._open[account]
        debt.used += used
        for slice_ in slices:
            debt.parts[slice_] = debt.parts.get(slice_, NOTHING) + used

    async def flush(self) -> None:
        """Have everything charged. What could not be, raising `StoreUnavailable`, is kept for the next time."""
        await all_of(self._pay(account) for account in {**self._sent, **self._open})

    async def _pay(self, account: Account) -> None:
        name = self._names.setdefault(account, f"a:{self._replica.next_id()}".encode())
        while debt := self._sent.get(account) or self._open.pop(account, None):
            self._sent[account] = debt
            await self._replica.charge(account, name, debt.ordinal, debt.used)
            del self._sent[account]
            for slice_, used in debt.parts.items():
                slice_.charged(used)
        del self._names[account]
