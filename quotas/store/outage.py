"""Requests that begin, go on or end during an outage of the store, by their tenant's `on_store_outage`.

closed: none begins. open: all begin; no limit counts them now. lease: requests begin that fit into this replica's
slices (quotas/store/slices.py).

When the store is back it takes over the running requests, and is charged once for the ended ones: with `open` also
beyond the limits, with `lease` from the slices. A budget is charged in the period of the return.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quotas.errors import StoreUnavailable
from quotas.policy.policy import Outage
from quotas.reservation import NOTHING, Ask, LimitState, Reservation, Usage
from quotas.store.account import QuotaAccount, TrackedReservation
from quotas.store.replica import ReplicaReservations, all_of, in_order
from quotas.store.replica_name import ReplicaName
from quotas.store.slices import Slice, Slices
from quotas.usage_row import rest_name

MAX_OPEN_CHARGES = 10_000  # rows; the use of further users and tags is summed up


@dataclass(slots=True)
class DeferredCharge:
    """Usage of one row of an account not yet charged by the store; `parts` are its amounts by slice."""

    ordinal: int
    used: Usage = NOTHING
    parts: dict[Slice, Usage] = field(default_factory=dict)


Payer = tuple[QuotaAccount, str | None]
"""An account and a row of its ledger."""


class DeferredCharges:
    """All deferred charges of this process. A charge sent repeatedly is charged to the limits and booked once."""

    def __init__(self, replica: ReplicaReservations) -> None:
        self._replica = replica
        self._names: dict[Payer, bytes] = {}  # the sender's name in the store
        self._open: dict[Payer, DeferredCharge] = {}
        self._sent: dict[Payer, DeferredCharge] = {}  # perhaps charged: they no longer change
        self._ordinal = 0

    def add(self, account: QuotaAccount, row: str | None, used: Usage, slices: Sequence[Slice]) -> None:
        if row is not None and (account, row) not in self._open and len(self._open) >= MAX_OPEN_CHARGES:
            row = rest_name(row)
        payer = account, row
        if payer not in self._open:
            self._ordinal += 1
            self._open[payer] = DeferredCharge(self._ordinal)
        charge = self._open[payer]
        charge.used += used
        for slice_ in slices:
            charge.parts[slice_] = charge.parts.get(slice_, NOTHING) + used

    @property
    def is_empty(self) -> bool:
        return not self._open and not self._sent

    async def flush(self) -> None:
        """Send every charge. Raises `StoreUnavailable` for unsent ones, which are kept for the next call."""
        await all_of(self._pay(payer) for payer in {**self._sent, **self._open})

    async def _pay(self, payer: Payer) -> None:
        name = self._names.setdefault(payer, f"a:{self._replica.next_id()}".encode())
        while charge := self._sent.get(payer) or self._open.pop(payer, None):
            self._sent[payer] = charge
            await self._replica.charge(*payer, name, charge.ordinal, charge.used)
            del self._sent[payer]
            for slice_, used in charge.parts.items():
                slice_.charged(used)
        del self._names[payer]


@dataclass(frozen=True, slots=True)
class LocalReservation:
    """A reservation unknown to the store, and the slices that it spends."""

    account: QuotaAccount
    tracked: TrackedReservation
    slices: tuple[Slice, ...]


class OutageFallback:
    """Decides for the store while it is away, and reports everything on its return. There is one per process."""

    def __init__(self, replica: ReplicaReservations, name: ReplicaName, clock: Callable[[], float]) -> None:
        """`clock` returns seconds, never backwards."""
        self.slices = Slices(replica, clock)
        self._replica = replica
        self._name = name
        self._deferred = DeferredCharges(replica)
        self._locals: dict[str, LocalReservation] = {}  # by reservation

    def reserve(self, account: QuotaAccount, ask: Ask, policy: Outage, reason: StoreUnavailable) -> Reservation:
        """Grant a reservation by the policy. Raises `StoreUnavailable` if the policy, or the slices, do not allow
        it.
        """
        slices = self._slices_for(account, ask, policy, reason)
        if slices and not self._name.give_up():
            raise StoreUnavailable(f"{reason}, and the slice cannot be marked as spent") from reason
        for slice_ in slices:
            slice_.spend(ask)
        states = _last_seen(account)
        reservation = Reservation(self._replica.next_id(), account.tenant, account.key, ask, account.limits, states)
        tracked = TrackedReservation(reservation, outage=policy)
        self._replica.add_local(account, tracked)
        self._locals[reservation.id] = LocalReservation(account, tracked, slices)
        return reservation

    def settle(self, account: QuotaAccount, tracked: TrackedReservation, used: Usage) -> None:
        """Settle a local reservation that has ended before the store took it over."""
        if tracked.is_offered:
            tracked.used = used  # perhaps it has: then it is to settle it
            return
        local = self._locals.pop(tracked.reservation.id)
        self._replica.forget(account, tracked)
        for slice_ in local.slices:
            slice_.return_unused(tracked.reservation.ask, used)
        self._deferred.add(account, tracked.reservation.ask.row, used, local.slices)

    async def reconcile(self) -> None:
        """Hand local reservations over to the store, send deferred charges and renew slices, with each heartbeat.

        Work that a failing call leaves undone is done by the next.
        """
        await in_order(self._adopt_all, self._deferred.flush, self.slices.renew)
        if not self._locals and self._deferred.is_empty:
            self._name.keep()

    async def close(self) -> None:
        await self.slices.close()

    async def _adopt_all(self) -> None:
        await all_of(self._adopt(account) for account in {local.account: None for local in self._locals.values()})

    async def _adopt(self, account: QuotaAccount) -> None:
        taken = await self._replica.adopt(account)
        for tracked in taken:
            local = self._locals.pop(tracked.reservation.id)
            for slice_ in local.slices:
                slice_.taken_over(tracked.reservation.ask)
        await self._replica.settle_ended(account, taken)

    def _slices_for(
        self, account: QuotaAccount, ask: Ask, policy: Outage, reason: StoreUnavailable
    ) -> tuple[Slice, ...]:
        match policy:
            case "closed":
                raise reason
            case "open":
                return ()
        slices = self.slices.fitting(account, ask)
        if slices is None:
            raise StoreUnavailable(f"{reason}, and this replica's slice is too small") from reason
        return slices


def _last_seen(account: QuotaAccount) -> Callable[[], tuple[LimitState, ...]]:
    seen = account.last_levels
    return (lambda: account.states(seen)) if seen else tuple
