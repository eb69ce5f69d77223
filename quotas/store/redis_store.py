"""The store on Redis (6.2 or later) or Valkey: each decision is one script, run atomically on the server's clock.

Of a tenant there is one hash, `sluice:{tenant}`:

    now, generation              the latest time seen (us), and which life of this state it is
    requests/min, tokens/day..   level of each of the tenant's limits (lua/level.lua)
    r:<replica>.<ordinal>        a reservation (lua/record.lua)
    p:<replica>, lease           when each replica's lease ends (us), and the earliest of these ends
    s:<replica>.<ordinal>        what a replica may spend of some limits while the store is away (lua/slice.lua)

beside `sluice:{tenant}:key:<key>`, levels of the limits of one API key, and `sluice:{tenant}:usage:<day>`, the ledger.
State that no longer differs from none expires.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import date, timedelta
from functools import partial
from urllib.parse import unquote

from redis.exceptions import NoPermissionError

from quotas.errors import QuotaError, StoreUnavailable, StoreUnsuitable
from quotas.policy.limit import EPOCH, Limit
from quotas.policy.policy import Outage
from quotas.reservation import Ask, LimitState, Reservation, Usage
from quotas.store.account import PREFIX, Account, Figures, Held, state_key
from quotas.store.outage import OutageFallback
from quotas.store.redis_client import RedisClient
from quotas.store.replica import Replica
from quotas.store.scripts import Script, ScriptRunner
from quotas.store.store import Observer
from quotas.store.usage_ledger import UsageLedger


class KvPool:
    """One per process. The leases of all replicas never add up to more than the limit that was last asked with."""

    def __init__(self, runner: ScriptRunner, replica: str, lease: float) -> None:
        """`lease` in seconds: how long what is granted lasts unless it is renewed."""
        self._runner = runner
        self._replica = replica.encode()
        self._lease = lease

    async def lease(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        """Lease up to `wanted` of `limit` bytes, instead of those granted before.

        Returns the bytes granted, and for how many seconds from this call on. Raises `StoreUnavailable`.
        """
        key = f"{state_key(tenant)}:kv".encode()
        numbers = (b"%d" % wanted, b"%d" % limit, b"%d" % round(self._lease * 1e6))
        answer = await self._runner.call(Script.LEASE_KV, (key,), self._replica, *numbers)
        return int(answer[0]), self._lease


PATTERN = f"{PREFIX}:{{*}}:usage:*".encode()
LEDGER = re.compile(rb"%b:\{([!-z|~]{1,192})\}:usage:([0-9]{1,6})" % PREFIX.encode())
PER_CALL = b"1000"  # keys that one SCAN looks at, so that others are not kept waiting


async def ledgers(client: RedisClient) -> list[tuple[str, date]]:
    """The tenants and the UTC days that have one. It reads the names of all keys of the server's database.

    Raises `StoreUnavailable`, and `StoreUnsuitable` where that is not permitted.
    """
    found: set[tuple[str, date]] = set()
    cursor = b"0"
    while True:
        try:
            cursor, names = await client.execute(b"SCAN", cursor, b"MATCH", PATTERN, b"COUNT", PER_CALL)
        except NoPermissionError as error:
            raise StoreUnsuitable(
                f"to find all tenants, the store's user needs the permission +scan: {error}"
            ) from error
        found.update(_named(names))
        if cursor == b"0":
            return sorted(found)


def _named(names: list[bytes]) -> Iterator[tuple[str, date]]:
    for name in names:
        if match := LEDGER.fullmatch(name):
            yield unquote(match[1].decode()), EPOCH + timedelta(days=int(match[2]))


LEASE = 30.0  # seconds
TIMEOUT = 0.25  # seconds


class RedisStore:
    """A `Store`; one per process. What a dead one holds is free again a lease after its last heartbeat."""

    def __init__(
        self, runner: ScriptRunner, lease: float = LEASE, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`lease` is the life of a heartbeat in seconds. Closing the store closes the runner."""
        self._runner = runner
        self._replica = Replica(runner, lease)
        self._ledger = UsageLedger(runner, self._replica.id)
        self._kv_pool = KvPool(runner, self._replica.id, lease)
        self._bridge = OutageFallback(self._replica, monotonic)
        self._monotonic = monotonic
        self._accounts: dict[tuple[str, str | None], Account] = {}

    @classmethod
    def at(cls, url: str, timeout: float = TIMEOUT, lease: float = LEASE) -> "RedisStore":
        """`url` as redis-py takes it, `timeout` the most seconds that a call waits for an answer."""
        return cls(ScriptRunner(url, timeout), lease)

    @property
    def replica(self) -> str:
        """The random id by which the store knows this process."""
        return self._replica.id

    @property
    def lease(self) -> float:
        return self._replica.lease

    @property
    def is_connected(self) -> bool:
        return self._runner.client.is_connected

    @property
    def on_command(self) -> list[Observer]:
        return self._runner.on_command

    @property
    def num_outages(self) -> int:
        return self._runner.client.num_outages

    @property
    def num_held(self) -> int:
        return self._replica.num_held

    async def connect(self) -> None:
        """Raise `StoreUnavailable` if the server cannot be reached now (attempts go on in the background), and
        `StoreUnsuitable` if it must not be used as it is.
        """
        await self._runner.client.connect()

    @property
    def returned(self) -> asyncio.Event:
        return self._runner.client.returned

    async def close(self) -> None:
        with suppress(QuotaError):
            await self._bridge.close()
        await self._runner.client.close()

    async def reserve(
        self, tenant: str, key: str | None, limits: tuple[Limit, ...], ask: Ask, outage: Outage = "closed"
    ) -> Reservation:
        account = self._account(tenant, key, limits)
        account.refuse_unfit(ask)
        try:
            reservation = await self._reserve(account, ask, outage)
        except StoreUnavailable as error:
            return self._bridge.reserve(account, ask, outage, error)
        if outage == "lease":
            self._bridge.slices.want(account, ask)
        return reservation

    async def _reserve(self, account: Account, ask: Ask, outage: Outage) -> Reservation:
        reservation, granted, figures = await self._take(account, ask, outage)
        if not granted and await self._bridge.slices.give_way(account):
            reservation, granted, figures = await self._take(account, ask, outage)
        if not granted:
            refusal = account.refusal(ask, figures)
            refusal.measure = partial(account.states, figures)
            raise refusal
        reservation.measure = partial(account.states, figures)
        return reservation

    async def _take(self, account: Account, ask: Ask, outage: Outage) -> tuple[Reservation, bool, Figures]:
        reservation = Reservation(self._replica.next_id(), account.tenant, account.key, ask, account.limits, tuple)
        granted, figures = await self._replica.take(account, Held(reservation, outage=outage))
        return reservation, granted, figures

    async def extend(self, reservation: Reservation, more_output: int) -> None:
        if (found := self._replica.holds(reservation.id)) is None:
            raise ValueError(f"reservation {reservation.id} was settled: it cannot be extended")
        account, held = found
        more = Ask(0, 0, more_output)
        account.refuse_unfit(more)
        try:
            if held.is_local:
                raise StoreUnavailable("the quota store has not taken over this request yet")
            await self._extend(account, held, more)
        except StoreUnavailable as error:
            held.extensions += (self._bridge.reserve(account, more, held.outage, error),)

    async def _extend(self, account: Account, held: Held, more: Ask) -> None:
        reservation = held.reservation
        ask = replace(reservation.ask, output_tokens=reservation.ask.output_tokens + more.output_tokens)
        granted, figures = await self._replica.extend(account, held, ask)
        if not granted:
            raise account.refusal(more, figures)
        reservation.measure = partial(account.states, figures)

    async def settle(self, reservation: Reservation, usage: Usage) -> None:
        match self._replica.holds(reservation.id):
            case account, held if held.used is None:
                await self._settle(account, held, usage)

    async def _settle(self, account: Account, held: Held, usage: Usage) -> None:
        used = usage
        if held.extensions:
            used = replace(usage, output_tokens=min(usage.output_tokens, held.reservation.ask.output_tokens))
            await self._settle_extensions(held, usage.output_tokens - used.output_tokens)
        if held.is_local:
            self._bridge.settle(account, held, used)
            return
        held.used = used
        with suppress(StoreUnavailable):  # a later heartbeat does it
            await self._replica.settle(account, held)

    async def _settle_extensions(self, held: Held, output_tokens: int) -> None:
        for extension in held.extensions:
            used = min(output_tokens, extension.ask.output_tokens)
            output_tokens -= used
            await self.settle(extension, Usage(output_tokens=used, requests=0))

    async def states(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> tuple[LimitState, ...]:
        account = self._account(tenant, key, limits)
        return account.states(await self._replica.look(account))

    def book(self, tenant: str, key: str | None, usage: Usage) -> None:
        self._ledger.add(tenant, key, usage)

    async def lease_kv(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        return await self._kv_pool.lease(tenant, limit, wanted)

    async def heartbeat(self) -> None:
        await self._replica.heartbeat()
        await self._bridge.heal()
        await self._ledger.flush()
        self._forget_idle()

    async def usage(self, tenant: str, day: date) -> dict[str | None, Usage]:
        return await self._ledger.of(tenant, day)

    async def ledgers(self) -> list[tuple[str, date]]:
        """The tenants and UTC days that the connected server has a ledger of, in no order."""
        return await ledgers(self._runner.client)

    def _account(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> Account:
        account = self._accounts.get((tenant, key))
        if account is None or not (account.limits is limits or account.limits == limits):
            older, account = account, Account(tenant, key, limits, self._replica.id, self._replica.lease)
            if older is not None:
                account.remember(older)
                self._bridge.slices.forget(older)
            self._accounts[tenant, key] = account
        account.last_used = self._monotonic()
        return account

    def _forget_idle(self) -> None:
        """Drop accounts of which nothing can be left in the store."""
        now = self._monotonic()
        for name, account in list(self._accounts.items()):
            if not account.held and now > account.last_used + account.life:
                del self._accounts[name]
                self._bridge.slices.forget(account)
