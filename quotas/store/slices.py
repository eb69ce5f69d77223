"""Slices: parts of limits that this replica may spend while the store is away, granted while it answers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from quotas.errors import QuotaError
from quotas.policy.limit import Limit
from quotas.reservation import Ask, Usage
from quotas.store.account import QuotaAccount
from quotas.store.replica import ReplicaReservations, all_of

Amounts = tuple[int, int, int]  # of requests, input and output tokens
NOTHING_ASKED: Amounts = (0, 0, 0)
MIN_WINDOW_SECONDS = 0.5  # shortest time to extrapolate demand from


class Demand:
    """The amounts asked for in the present period and in the one before it."""

    def __init__(self, period: float, now: float) -> None:
        """`period` is in seconds."""
        self._period = period
        self._asked = self._asked_before = NOTHING_ASKED
        self._largest = self._largest_before = NOTHING_ASKED
        self._turned = self._turned_before = now

    def add(self, ask: Ask) -> None:
        requests, given, output = ask.requests, ask.input_tokens, ask.output_tokens
        asked, most = self._asked, self._largest
        self._asked = (asked[0] + requests, asked[1] + given, asked[2] + output)
        self._largest = (max(most[0], requests), max(most[1], given), max(most[2], output))

    def turn(self, now: float) -> None:
        """Begin a new period if the present one has ended."""
        if now < self._turned + self._period:
            return
        self._asked_before, self._asked = self._asked, NOTHING_ASKED
        self._largest_before, self._largest = self._largest, NOTHING_ASKED
        self._turned_before, self._turned = self._turned, now

    @property
    def largest(self) -> Ask:
        """The largest ask of one request, by amount; zero without any."""
        return Ask(*map(max, self._largest, self._largest_before))

    @property
    def is_none(self) -> bool:
        return self._largest == self._largest_before == NOTHING_ASKED

    def within(self, seconds: float, now: float) -> Ask:
        """The expected amounts of `seconds` at this demand; at least the largest request."""
        ratio = seconds / max(now - self._turned_before, MIN_WINDOW_SECONDS)
        largest = map(max, self._largest, self._largest_before)
        expected = (round((one + before) * ratio) for one, before in zip(self._asked, self._asked_before, strict=True))
        return Ask(*map(max, largest, expected))


SAFE_SHARE_OF_LEASE = 0.9  # the store must not end a slice before its replica has, and clocks differ in pace


class Slice:
    """Amounts of each limit of `account`, in units, that the store has set aside for this replica.

    Spent amounts stay spent until the store has charged them.
    """

    def __init__(self, account: QuotaAccount, field: bytes, lease: float, now: float) -> None:
        """`field` is its name in the store; `lease` is in seconds."""
        self.account = account
        self.field = field
        self.users: set[QuotaAccount] = set()  # accounts that spend it; without any it is given back
        self.lock = asyncio.Lock()  # one call about it at a time
        self.demand = Demand(lease / 2, now)
        self._lease = lease
        self._expires = float("-inf")
        none = [0] * len(account.limits)
        self._granted, self._target, self._spent = none, none, none

    @property
    def is_empty(self) -> bool:
        return not any(self._granted) and not any(self._spent)

    @property
    def granted(self) -> list[int]:
        """The amounts set aside, by limit."""
        return self._granted

    @property
    def exceeds_target(self) -> bool:
        return any(
            granted > max(target, spent)
            for granted, target, spent in zip(self._granted, self._target, self._spent, strict=True)
        )

    def fits(self, ask: Ask, now: float) -> bool:
        rows = zip(self._granted, self._spent, self._costs(ask), strict=True)
        return now < self._expires and all(cost == 0 or spent + cost <= granted for granted, spent, cost in rows)

    def spend(self, ask: Ask) -> None:
        self._add(self._costs(ask))

    def return_unused(self, ask: Ask, used: Usage) -> None:
        """Take back the unused part of an ended request's `ask`."""
        self._add(self._kept(used))
        self.taken_over(ask)

    def charged(self, used: Usage) -> None:
        """Free the amounts of ended requests that the store has charged."""
        self._add([-amount for amount in self._kept(used)])

    def taken_over(self, ask: Ask) -> None:
        """Free the amounts of a request whose reservation the store now holds."""
        self._add([-cost for cost in self._costs(ask)])

    def request(self, now: float) -> list[int]:
        """The arguments of lua/slice.lua: amounts to keep, to expect, and for one request.

        Until the store has answered, spending stays within the amounts to keep.
        """
        rows = zip(self._granted, self._target, self._spent, strict=True)
        self._granted = [max(min(granted, target), spent) for granted, target, spent in rows]
        wanted = self._costs(self.demand.within(self._lease, now))
        return [*self._granted, *wanted, *self._costs(self.demand.largest)]

    def release(self) -> list[int]:
        """The arguments of a request that gives back all unspent amounts."""
        self._granted = list(self._spent)
        return [*self._granted, *([0] * (2 * len(self._granted)))]

    def grant(self, answer: Sequence[int], asked: float) -> None:
        """Apply the store's answer to a request made at the time `asked`."""
        count = len(self._granted)
        self._granted, self._target = list(answer[:count]), list(answer[count:])
        self._expires = asked + self._lease * SAFE_SHARE_OF_LEASE

    def _costs(self, ask: Ask) -> list[int]:
        return [0 if limit.is_soft else ask.of(limit) for limit in self.account.limits]

    def _kept(self, used: Usage) -> list[int]:
        """The amounts that stay used after the end: held resources are given back."""
        return [used.of(limit) if limit.window and not limit.is_soft else 0 for limit in self.account.limits]

    def _add(self, amounts: Sequence[int]) -> None:
        self._spent = [spent + amount for spent, amount in zip(self._spent, amounts, strict=True)]


class Slices:
    """All slices of this process: one of each tenant's limits for all keys, one of each key's own limits, and one of
    each team's limits for all its tenants.

    A slice is requested with the first request, renewed with each heartbeat, and given back without further requests.
    """

    def __init__(self, replica: ReplicaReservations, clock: Callable[[], float]) -> None:
        """`clock` returns seconds, never backwards."""
        self._replica = replica
        self._clock = clock
        self._slices: dict[bytes, dict[tuple[Limit, ...], Slice]] = {}  # by the key of the levels, and limits
        self._of: dict[QuotaAccount, tuple[Slice, ...]] = {}
        self._releasing: set[Slice] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def add_demand(self, account: QuotaAccount, ask: Ask) -> None:
        """Count a granted request, an outage's too: the store may be back for less than a period before the next."""
        slices = self._of.get(account)
        if slices is None:
            scopes = [scope for scope in account.scopes.items() if scope[0] != account.session]
            slices = self._of[account] = tuple(self._scope(account, levels, limits) for levels, limits in scopes)
            for slice_ in slices:
                slice_.users.add(account)
        for slice_ in slices:
            slice_.demand.add(ask)

    def fitting(self, account: QuotaAccount, ask: Ask) -> tuple[Slice, ...] | None:
        """The slices to spend `ask` from; None if one of them is too small now, and for a session with limits, which
        has none.
        """
        if account.session is not None:
            return None
        slices, now = self._of.get(account), self._clock()
        return slices if slices and all(slice_.fits(ask, now) for slice_ in slices) else None

    async def release(self, account: QuotaAccount) -> bool:
        """Give back this replica's slices of the account and of limits that a new policy has replaced; returns False
        without any.
        """
        replaced = (
            slice_ for levels in account.scopes for slice_ in self._slices.get(levels, {}).values() if not slice_.users
        )
        slices = (*self._of.get(account, ()), *replaced)
        held = [slice_ for slice_ in slices if not slice_.is_empty or slice_ in self._releasing]
        await all_of(self._release(slice_) for slice_ in held)
        return bool(held)

    def granted(self) -> dict[str, int]:
        """The units set aside for this replica, by resource."""
        total = Counter[str]()
        for slice_ in self._all():
            for limit, amount in zip(slice_.account.limits, slice_.granted, strict=True):
                total[limit.resource] += amount
        return dict(total)

    def forget(self, account: QuotaAccount) -> None:
        for slice_ in self._of.pop(account, ()):
            slice_.users.discard(account)

    def replace(self, older: QuotaAccount, newer: QuotaAccount) -> None:
        """A new policy has replaced the limits of `older`, its tenant's for the accounts of other keys as well."""
        for slice_ in self._of.get(older, ()):
            if slice_.account.limits not in newer.scopes.values():
                for account in list(slice_.users):
                    self.forget(account)
        self.forget(older)

    async def renew(self) -> None:
        """Renew every slice; each heartbeat calls it."""
        await all_of(map(self._renew, self._all()))

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        await all_of(map(self._release, self._all()))

    def _all(self) -> list[Slice]:
        return [slice_ for slices in self._slices.values() for slice_ in slices.values()]

    def _scope(self, account: QuotaAccount, levels: bytes, limits: tuple[Limit, ...]) -> Slice:
        return self._slices.get(levels, {}).get(limits) or self._open(account, levels, limits)

    def _open(self, account: QuotaAccount, levels: bytes, limits: tuple[Limit, ...]) -> Slice:
        key, state = account.key if limits[0].key else None, levels if levels in account.shared else None
        scope = QuotaAccount(account.tenant, key, limits, self._replica.id, self._replica.lease, state)
        slice_ = Slice(scope, f"s:{self._replica.next_id()}".encode(), self._replica.lease, self._clock())
        self._slices.setdefault(levels, {})[limits] = slice_
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
        if slice_.exceeds_target:  # what it kept until the answer is above the target that the answer named
            await self._ask(slice_)
        if slice_.is_empty and (slice_.demand.is_none or not slice_.users):
            self._drop(slice_)

    def _drop(self, dropped: Slice) -> None:
        for account in list(dropped.users):
            self.forget(account)
        ((levels, limits),) = dropped.account.scopes.items()
        slices = self._slices.get(levels, {})
        if slices.get(limits) is dropped:
            del slices[limits]
            if not slices:
                del self._slices[levels]

    async def _ask(self, slice_: Slice) -> None:
        async with slice_.lock:
            asked = self._clock()
            numbers = slice_.request(asked) if slice_.users else slice_.release()
            slice_.grant(await self._replica.slice(slice_.account, slice_.field, numbers), asked)

    async def _release(self, slice_: Slice) -> None:
        """Give the slice back. Concurrent callers wait for the same answer."""
        is_first = slice_ not in self._releasing
        self._releasing.add(slice_)
        try:
            async with slice_.lock:
                if is_first:
                    asked, numbers = self._clock(), slice_.release()
                    slice_.grant(await self._replica.slice(slice_.account, slice_.field, numbers), asked)
        finally:
            if is_first:
                self._releasing.discard(slice_)
