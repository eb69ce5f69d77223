"""Requests that begin, go on or end while the store is away, as the policy of their tenant says.

closed   none begins
open     all begin; no limit counts them now
lease    those begin that fit into what the store has set aside for this replica (quotas/store/slices.py)

When the store is back it takes over those that still run, and is charged for those that have ended, once: of `open`
whatever the limits hold, of `lease` what was set aside for it. A budget is charged in the period of the return.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quotas.errors import StoreUnavailable
from quotas.policy.policy import Outage
from quotas.reservation import NOTHING, Ask, LimitState, Reservation, Usage
from quotas.store.account import Account, Held
from quotas.store.replica import Replica, all_of
from quotas.store.slices import Slice, Slices


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


@dataclass(frozen=True, slots=True)
class LocalReservation:
    """A reservation that no store has made yet, and what it is spent from."""

    account: Account
    held: Held
    slices: tuple[Slice, ...]


class OutageFallback:
    """One per process."""

    def __init__(self, replica: Replica, clock: Callable[[], float]) -> None:
        """`clock` as in `Slices`."""
        self.slices = Slices(replica, clock)
        self._replica = replica
        self._arrears = Arrears(replica)
        self._locals: dict[str, LocalReservation] = {}  # by reservation

    def reserve(self, account: Account, ask: Ask, policy: Outage, reason: StoreUnavailable) -> Reservation:
        """Raises `StoreUnavailable` where the policy says so."""
        slices = self._slices_for(account, ask, policy, reason)
        for slice_ in slices:
            slice_.spend(ask)
        states = _last_seen(account)
        reservation = Reservation(self._replica.next_id(), account.tenant, account.key, ask, account.limits, states)
        held = Held(reservation, outage=policy)
        self._replica.take_locally(account, held)
        self._locals[reservation.id] = LocalReservation(account, held, slices)
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
