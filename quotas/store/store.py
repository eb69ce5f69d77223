"""Where it is kept what tenants have spent: the one truth of all replicas."""

import asyncio
from collections.abc import Callable
from datetime import date
from typing import Protocol

from quotas.policy.limit import Limit
from quotas.policy.policy import Outage
from quotas.reservation import Ask, LimitState, Reservation, Usage

Observer = Callable[[str, float, float, Exception | None], object]
"""Told of each command that was sent to the store: its name, when it began and ended, in seconds of `time.monotonic`,
and what failed it. It is called where the command was awaited, in the context of whoever wanted it.
"""


class Store(Protocol):
    """Every call is atomic, and raises `StoreUnavailable` within a bounded time if the store does not answer.

    `limits` are those that requests are charged to, the tenant's own before its key's.
    """

    @property
    def on_command(self) -> list[Observer]: ...

    @property
    def is_connected(self) -> bool: ...

    @property
    def num_outages(self) -> int:
        """How often it was lost, or could not be reached to begin with."""
        ...

    @property
    def num_held(self) -> int:
        """Reservations of this replica that are not settled yet."""
        ...

    @property
    def returned(self) -> asyncio.Event:
        """Set each time that the store is reached again; whoever waits for it clears it and calls `heartbeat`."""
        ...

    async def reserve(
        self, tenant: str, key: str | None, limits: tuple[Limit, ...], ask: Ask, outage: Outage = "closed"
    ) -> Reservation:
        """Charge `ask` to every limit, or to none and raise `Refused`. While the store is away, go on as `outage` says
        (quotas/store/outage.py).
        """
        ...

    async def extend(self, reservation: Reservation, more_output: int) -> None:
        """Charge so many more output tokens to every limit, or none and raise `Refused`; in an outage as `reserve`."""
        ...

    async def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Return what was reserved and not used; book the usage. A second settle does nothing.

        If the store is away, it is remembered and done by a later `heartbeat`; the caller never needs to repeat it.
        """
        ...

    def book(self, tenant: str, key: str | None, usage: Usage) -> None:
        """Book what no limit counted; the next `heartbeat` tells the store."""
        ...

    async def lease_kv(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        """Lease up to `wanted` of the `limit` bytes of KV memory that all replicas may hold for the tenant, instead of
        what was leased before. Returns the bytes granted, and for how many seconds from the call on.
        """
        ...

    async def states(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> tuple[LimitState, ...]: ...

    async def heartbeat(self) -> None:
        """Renew this replica's leases, report progress and bookings; to be called three times a lease or oftener."""
        ...

    async def usage(self, tenant: str, day: date) -> dict[str | None, Usage]:
        """What each key of the tenant used on a UTC day; None stands for requests without a key."""
        ...

    async def ledgers(self) -> list[tuple[str, date]]:
        """The tenants and UTC days that the connected server has a ledger of, in no order."""
        ...

    async def close(self) -> None: ...
