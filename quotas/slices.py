"""Slices of the limits that requests have come for, kept up while the store answers."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from quotas.account import Account
from quotas.errors import QuotaError
from quotas.limit import Limit
from quotas.replica import Replica, all_of
from quotas.reservation import Ask
from quotas.slice import Slice


class Slices:
    """One per process. There is one of a tenant's own limits, whatever key is used, and one of those of each key.

    They are asked for with the first request, renewed with each heartbeat, and given back when no request comes.
    """

    def __init__(self, replica: Replica, clock: Callable[[], float]) -> None:
        """`clock` in seconds, never backwards."""
        self._replica = replica
        self._clock = clock
        self._slices: dict[tuple[str, tuple[Limit, ...]], Slice] = {}
        self._of: dict[Account, tuple[Slice, ...]] = {}
        self._locks: dict[Slice, asyncio.Lock] = {}
        self._releasing: set[Slice] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def want(self, account: Account, ask: Ask) -> None:
        """A request has come that the store will answer."""
        slices = self._of.get(account)
        if slices is None:
            slices = self._of[account] = tuple(self._scope(account, limits) for limits in account.scopes)
        for slice_ in slices:
            slice_.demand.add(ask)

    def covering(self, account: Account, ask: Ask) -> tuple[Slice, ...] | None:
        """Those that `ask` is to be spent from, if it fits into all of them now."""
        slices, now = self._of.get(account), self._clock()
        return slices if slices and all(slice_.fits(ask, now) for slice_ in slices) else None

    async def give_way(self, account: Account) -> bool:
        """Give back what is set aside for this replica of these limits; False when it was nothing."""
        slices = self._of.get(account, ())
        held = [slice_ for slice_ in slices if not slice_.is_empty or slice_ in self._releasing]
        await all_of(self._release(slice_) for slice_ in held)
        return bool(held)

    def forget(self, account: Account) -> None:
        self._of.pop(account, None)

    async def renew(self) -> None:
        """With each heartbeat."""
        await all_of(self._renew(slice_) for slice_ in list(self._locks))

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        await all_of(self._release(slice_) for slice_ in list(self._locks))

    def _scope(self, account: Account, limits: tuple[Limit, ...]) -> Slice:
        return self._slices.get((account.tenant, limits)) or self._open(account, limits)

    def _open(self, account: Account, limits: tuple[Limit, ...]) -> Slice:
        key = account.key if limits[0].key else None
        scope = Account(account.tenant, key, limits, self._replica.id, self._replica.lease)
        slice_ = Slice(scope, f"s:{self._replica.next_id()}".encode(), self._replica.lease, self._clock())
        self._slices[account.tenant, limits] = slice_
        self._locks[slice_] = asyncio.Lock()
        task = asyncio.create_task(self._begin(slice_))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return slice_

    async def _begin(self, slice_: Slice) -> None:
        with suppress(QuotaError):  # a later heartbeat asks again
            await self._ask(slice_)

    async def _renew(self, slice_: Slice) -> None:
        slice_.demand.turn(self._clock())
        await self._ask(slice_)
        if slice_.exceeds_its_due:  # it knows only now
            await self._ask(slice_)
        if slice_.is_empty and slice_.demand.is_none:
            self._drop(slice_)

    def _drop(self, dropped: Slice) -> None:
        del self._locks[dropped]
        self._slices = {name: slice_ for name, slice_ in self._slices.items() if slice_ is not dropped}
        self._of = {account: slices for account, slices in self._of.items() if dropped not in slices}

    async def _ask(self, slice_: Slice) -> None:
        async with self._locks[slice_]:
            asked = self._clock()
            numbers = slice_.request(asked)
            slice_.grant(await self._replica.slice(slice_.account, slice_.field, numbers), asked)

    async def _release(self, slice_: Slice) -> None:
        """Those who come meanwhile wait for the same."""
        is_first = slice_ not in self._releasing
        self._releasing.add(slice_)
        try:
            async with self._locks[slice_]:
                if is_first:
                    asked, numbers = self._clock(), slice_.release()
                    slice_.grant(await self._replica.slice(slice_.account, slice_.field, numbers), asked)
        finally:
            if is_first:
                self._releasing.discard(slice_)
