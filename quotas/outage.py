"""Requests that begin, go on or end while the store is away, as the policy of their tenant says.

closed   none begins
open     all begin; no limit counts them now
lease    those begin that fit into what the store has set aside for this replica (quotas/slices.py)

When the store is back it takes over those that still run, and is charged for those that have ended, once: of `open`
whatever the limits hold, of `lease` what was set aside for it. A budget is charged in the period of the return.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quotas.account import Account, Held
from quotas.arrears import Arrears
from quotas.errors import StoreUnavailable
from quotas.policy import Outage
from quotas.replica import Replica, all_of
from quotas.reservation import Ask, LimitState, Reservation, Usage
from quotas.slice import Slice
from quotas.slices import Slices


@dataclass(frozen=True, slots=True)
class Local:
    """A reservation that no store has made yet, and what it is spent from."""

    account: Account
    held: Held
    slices: tuple[Slice, ...]


class Bridge:
    """One per process."""

    def __init__(self, replica: Replica, clock: Callable[[], float]) -> None:
        """`clock` as in `Slices`."""
        self.slices = Slices(replica, clock)
        self._replica = replica
        self._arrears = Arrears(replica)
        self._locals: dict[str, Local] = {}  # by reservation

    def reserve(self, account: Account, ask: Ask, policy: Outage, reason: StoreUnavailable) -> Reservation:
        """Raises `StoreUnavailable` where the policy says so."""
        slices = self._slices_for(account, ask, policy, reason)
        for slice_ in slices:
            slice_.spend(ask)
        states = _last_seen(account)
        reservation = Reservation(self._replica.next_id(), account.tenant, account.key, ask, account.limits, states)
        held = Held(reservation, outage=policy)
        self._replica.take_locally(account, held)
        self._locals[reservation.id] = Local(account, held, slices)
        return reservation

    def settle(self, account: Account, held: Held, used: Usage) -> None:
        """A local reservation has ended before the store took it over."""
        if held.is_offered:
            held.used = used  # perhaps it has: then it is to settle it
            return
        local = self._locals.pop(held.reservation.id)
        self._replica.let_go(account, held)
        for slice_ in local.slices:
            slice_.end(held.reservation.ask, used)
        self._arrears.add(account, used, local.slices)

    async def heal(self) -> None:
        """With each heartbeat, while the store answers. What it raises leaves the rest to the next."""
        await all_of(self._adopt(account) for account in {local.account: None for local in self._locals.values()})
        await self._arrears.flush()
        await self.slices.renew()

    async def close(self) -> None:
        await self.slices.close()

    async def _adopt(self, account: Account) -> None:
        for held in await self._replica.adopt(account):
            local = self._locals.pop(held.reservation.id)
            for slice_ in local.slices:
                slice_.taken_over(held.reservation.ask)

    def _slices_for(self, account: Account, ask: Ask, policy: Outage, reason: StoreUnavailable) -> tuple[Slice, ...]:
        match policy:
            case "closed":
                raise reason
            case "open":
                return ()
        slices = self.slices.covering(account, ask)
        if slices is None:
            raise StoreUnavailable(f"{reason}, and what was set aside for this replica does not suffice") from reason
        return slices


def _last_seen(account: Account) -> Callable[[], tuple[LimitState, ...]]:
    seen = account.seen
    return (lambda: account.states(seen)) if seen else tuple
