"""The store on Redis (6.2 or later) or Valkey: each decision is one script, run atomically on the server's clock.

A tenant has one hash, `sluice:{tenant}`:

    now, generation              the latest time seen (us), and which life of this state it is
    requests/min, tokens/day..   level of each of the tenant's limits (lua/level.lua)
    r:<replica>.<ordinal>        a reservation (lua/record.lua); behind a router, with .<request>
    q:<request>                  the fields of its attempts' reservations
    x:<replica>.<ordinal>        of a reservation that a later attempt or its router has settled: for its replica
    g:<replica>.<ordinal>        of one that was reclaimed: for its replica, if it returns within the hour
    p:<replica>, lease           when each replica's lease ends (us), and the earliest of these ends
    s:<replica>.<ordinal>        what a replica may spend of some limits while the store is away (lua/slice.lua)
    lost:<limit>                 what counts as used of a budget since replicas were lost
    alert:<limit>:<percent>:..   an alert of a budget: who sends it, or how it ended (quotas/store/budget_alerts.py)

beside `sluice:{tenant}:key:<key>`, levels of the limits of one API key, `:session:<digest>`, those of one session,
`:ledger:<first day>`, the ledger of a month (lua/ledger.lua), `:booked`, the last ordinal that each replica booked,
`:kv`, the leases of KV memory, `:done`, what the latest calls did, and what is stored of /v1/responses
(`quotas.store.responses`). State that no longer differs from none expires. `sluice:running:<day>` has the microseconds
for which each process ran.

A team has such a hash, `sluice:{team:<team>}`, for levels and slices of its limits; reservations are in their tenants'.

    t:sluice:{tenant}            until when that tenant need not be reclaimed for it; the earliest counts in `lease`
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import urandom

from quotas.errors import QuotaError, StoreUnavailable
from quotas.policy.limit import Limit
from quotas.policy.policy import Outage
from quotas.reservation import Ask, Delivered, LimitState, Reservation, Usage
from quotas.store.account import Levels, QuotaAccount, TrackedReservation, state_key, team_state_key
from quotas.store.announcements import Announcements
from quotas.store.batches import BatchStore, FinishedLine
from quotas.store.budget_alerts import BudgetAlerts
from quotas.store.budget_states import BudgetHashes, BudgetLevel, BudgetOwner
from quotas.store.outage import OutageFallback
from quotas.store.replica import ReplicaReservations, in_order
from quotas.store.replica_name import ReplicaName
from quotas.store.responses import ResponseStore
from quotas.store.scripts import CommandObserver, Script, ScriptRunner
from quotas.store.served_sums import ServedSums
from quotas.store.usage_ledger import UsageLedger
from quotas.usage_row import key_name

LEASE_SECONDS = 30.0
TIMEOUT_SECONDS = 0.25
MAX_SESSIONS = 2000  # whose accounts this process keeps: of others it does not know what the store loses


class RedisStore:
    """The store on Redis or Valkey, one per process. A dead process's reservations are free again a lease after its
    last heartbeat.

    Every call is atomic, and raises `StoreUnavailable` within a bounded time if the store does not answer. `limits` are
    the limits that requests are charged to: the tenant's own, its key's, and its team's, in this order.
    """

    def __init__(
        self,
        runner: ScriptRunner,
        lease: float = LEASE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        name: ReplicaName | None = None,
    ) -> None:
        """`lease` is a heartbeat's validity in seconds. Closing the store closes the runner."""
        name = name or ReplicaName()
        self._runner = runner
        self._replica = ReplicaReservations(runner, lease, name)
        self.ledger = UsageLedger(runner, name)
        self._fallback = OutageFallback(self._replica, name, monotonic)
        self._monotonic = monotonic
        self.alerts = BudgetAlerts(runner, monotonic)
        self._accounts: dict[tuple[object, ...], QuotaAccount] = {}  # by tenant, key, and model with its own prices
        self._sessions: dict[tuple[object, ...], QuotaAccount] = {}  # by limits as well; the last used one is last
        self._settling: set[asyncio.Task[None]] = set()

    @classmethod
    def at(
        cls, url: str, timeout: float = TIMEOUT_SECONDS, lease: float = LEASE_SECONDS, name: ReplicaName | None = None
    ) -> "RedisStore":
        """A store at a `url` of redis-py; `timeout` is the longest wait of a call in seconds."""
        return cls(ScriptRunner(url, timeout), lease, name=name)

    @property
    def replica(self) -> str:
        """This process's id in the store."""
        return self._replica.id

    @property
    def lease(self) -> float:
        return self._replica.lease

    @property
    def is_connected(self) -> bool:
        return self._runner.client.is_connected

    @property
    def on_command(self) -> list[CommandObserver]:
        return self._runner.on_command

    @property
    def num_outages(self) -> int:
        """The number of outages, including a failure to connect at first."""
        return self._runner.client.num_outages

    @property
    def num_unsettled(self) -> int:
        """The number of this replica's unsettled reservations."""
        return self._replica.num_unsettled

    def set_aside(self) -> dict[str, int]:
        """The units set aside for this replica, by resource."""
        return self._fallback.slices.granted()

    async def connect(self) -> None:
        """Raise `StoreUnavailable` if the server cannot be reached now (attempts go on in the background), and
        `StoreUnsuitable` if it must not be used as it is.
        """
        await self._runner.client.connect()

    @property
    def returned(self) -> asyncio.Event:
        """An event that is set each time the store is reached again; its waiter clears it and calls `heartbeat`."""
        return self._runner.client.returned

    async def close(self) -> None:
        with suppress(QuotaError):
            await self._fallback.close()
        await self._runner.client.close()

    async def reserve(
        self, tenant: str, key: str | None, limits: tuple[Limit, ...], ask: Ask, outage: Outage = "closed"
    ) -> Reservation:
        """Charge `ask` to every limit, or charge nothing and raise `QuotaRefused`.

        While the store is away, `outage` decides what happens (quotas/store/outage.py).
        """
        account = self._account(tenant, key, limits)
        account.refuse_unfit(ask)
        try:
            if ask.attempt is not None and ask.attempt.number > 1:
                await self._replica.supersede(account, ask.attempt)
            reservation = await self._reserve(account, ask, outage)
        except StoreUnavailable as error:
            reservation = self._fallback.reserve(account, ask, outage, error)
        if outage == "lease":
            self._fallback.slices.add_demand(account, ask)
        return reservation

    async def _reserve(self, account: QuotaAccount, ask: Ask, outage: Outage) -> Reservation:
        reservation, granted, levels = await self._take(account, ask, outage)
        if not granted and await self._fallback.slices.release(account):
            reservation, granted, levels = await self._take(account, ask, outage)
        if not granted:
            refusal = account.refusal(ask, levels)
            refusal.measure = partial(account.states, levels)
            self.alerts.check(account, levels, refusal.limit)
            raise refusal
        self.alerts.check(account, levels)
        reservation.measure = partial(account.states, levels)
        return reservation

    async def _take(self, account: QuotaAccount, ask: Ask, outage: Outage) -> tuple[Reservation, bool, Levels]:
        reservation = Reservation(
            self._replica.next_id(ask.attempt), account.tenant, account.key, ask, account.limits, tuple
        )
        granted, levels = await self._replica.reserve(account, TrackedReservation(reservation, outage=outage))
        return reservation, granted, levels

    async def extend(self, reservation: Reservation, more_output: int) -> None:
        """Charge `more_output` tokens to every limit, or charge nothing and raise `QuotaRefused`; in an outage as
        `reserve`.
        """
        if (found := self._replica.find(reservation.id)) is None:
            raise ValueError(f"reservation {reservation.id} was settled: it cannot be extended")
        account, tracked = found
        more = Ask(0, 0, more_output, row=reservation.ask.row)
        account.refuse_unfit(more)
        try:
            if tracked.is_local:
                raise StoreUnavailable("the quota store has not taken over this request yet")
            await self._extend(account, tracked, more)
        except StoreUnavailable as error:
            tracked.extensions += (self._fallback.reserve(account, more, tracked.outage, error),)

    async def _extend(self, account: QuotaAccount, tracked: TrackedReservation, more: Ask) -> None:
        reservation = tracked.reservation
        ask = replace(reservation.ask, output_tokens=reservation.ask.output_tokens + more.output_tokens)
        granted, levels = await self._replica.extend(account, tracked, ask)
        refusal = None if granted else account.refusal(more, levels)
        self.alerts.check(account, levels, None if refusal is None else refusal.limit)
        if refusal is not None:
            raise refusal
        reservation.measure = partial(account.states, levels)

    async def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Return the unused part of a reservation, and book the usage. Idempotent.

        If the store is away, a later `heartbeat` does it; the caller never needs to repeat it.
        """
        settled = asyncio.get_running_loop().create_future()

        def done(error: BaseException | None) -> None:
            if settled.done():
                return  # the caller was cancelled
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error)

        self.settle_soon(reservation, usage, done)
        await settled

    def settle_soon(
        self, reservation: Reservation, usage: Usage, done: Callable[[BaseException | None], object]
    ) -> None:
        """Settle as `settle` does, and call `done` with None, or with the error that `settle` would raise.

        A settlement by one command needs no task that waits for the answer.
        """
        match self._replica.find(reservation.id):
            case account, tracked if tracked.used is None:
                if tracked.extensions or tracked.is_local:
                    self._in_task(self._settle(account, tracked, usage), done)
                    return
                tracked.used = usage

                def again() -> None:
                    self._in_task(self._settle_at_store(account, tracked), done)

                if not self._replica.settle_soon(account, tracked, done, again):
                    again()
            case _:
                done(None)

    def _in_task(self, settling: Coroutine[None, None, None], done: Callable[[BaseException | None], object]) -> None:
        task = asyncio.create_task(settling)
        self._settling.add(task)

        def ended(_: "asyncio.Task[None]") -> None:
            self._settling.discard(task)
            done(None if task.cancelled() else task.exception())

        task.add_done_callback(ended)

    async def _settle(self, account: QuotaAccount, tracked: TrackedReservation, usage: Usage) -> None:
        used = usage
        if tracked.extensions:
            output = min(usage.output_tokens, tracked.reservation.ask.output_tokens)
            used = usage._replace(output_tokens=output, reasoning_tokens=min(output, usage.reasoning_tokens))
            rest = usage.output_tokens - output, usage.reasoning_tokens - used.reasoning_tokens
            await self._settle_extensions(tracked, *rest)
        if tracked.is_local:
            self._fallback.settle(account, tracked, used)
            return
        tracked.used = used
        await self._settle_at_store(account, tracked)

    async def _settle_at_store(self, account: QuotaAccount, tracked: TrackedReservation) -> None:
        with suppress(StoreUnavailable):  # a later heartbeat retries
            await self._replica.settle(account, tracked)

    async def _settle_extensions(self, tracked: TrackedReservation, output: int, reasoning: int) -> None:
        for extension in tracked.extensions:
            used = Usage(output_tokens=min(output, extension.ask.output_tokens), requests=0)
            used = used._replace(reasoning_tokens=min(reasoning, used.output_tokens))
            output, reasoning = output - used.output_tokens, reasoning - used.reasoning_tokens
            await self.settle(extension, used)

    async def conclude(self, tenant: str, delivered: Delivered) -> bool:
        """Settle a request of a lost replica by its delivered part: its whole prompt and that output, or nothing if no
        answer had begun.

        Idempotent; its replica cannot settle it again if it lives on. Returns whether it was still open.
        """
        output = -1 if delivered.output_tokens is None else delivered.output_tokens
        words = (delivered.request.encode(), b"%d" % delivered.has_begun, b"%d" % output, urandom(8).hex().encode())
        return (await self._runner.call(Script.CONCLUDE, (state_key(tenant).encode(),), *words))[1] != b"0"

    async def states(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> tuple[LimitState, ...]:
        """The present state of each limit; an account only asked about is not kept."""
        account = self._accounts.get((tenant, key, _priced_model(limits)))
        if account is None or account.limits != limits:
            account = self._new_account(tenant, key, limits)
        return account.states(await self._replica.levels(account))

    async def states_of_team(self, team: str, limits: tuple[Limit, ...]) -> tuple[LimitState, ...]:
        """The present state of each limit of the team."""
        account = QuotaAccount("", None, limits, self._replica.id, self.lease, team_state_key(team).encode())
        return account.states(await self._replica.levels(account))

    async def budgets(self, owners: Sequence[BudgetOwner]) -> list[BudgetLevel]:
        """The level of each budget of some owners; it is read in a thread. `used` is None for an owner whose state
        cannot be settled. Raises `StoreUnavailable`.
        """
        levels, held = await self._budgets(owners)
        settled, found = list[BudgetOwner](), [one for one in levels if one.owner not in held]
        for owner in held:  # the scripts settle what a lost replica holds
            try:
                if owner.tenant is None:
                    await self.states_of_team(owner.team or "", owner.budgets)
                else:
                    await self.states(owner.tenant, owner.key, owner.budgets)
            except QuotaError:
                found += [BudgetLevel(owner, limit, None, {}, 0) for limit in owner.budgets]
            else:
                settled.append(owner)
        again, _ = await self._budgets(settled) if settled else ([], settled)
        return found + again

    async def _budgets(self, owners: Sequence[BudgetOwner]) -> tuple[list[BudgetLevel], list[BudgetOwner]]:
        hashes = await BudgetHashes.of(self._runner.client, owners)
        return await asyncio.to_thread(hashes.levels, owners)

    def book(self, tenant: str, key: str | None, usage: Usage, row: str | None = None) -> None:
        """Book usage that no limit counted, in a row of the ledger, by default its key's; the next `heartbeat` sends
        it.
        """
        self.ledger.add(tenant, row or key_name(key), usage)

    async def lease_kv(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        """Lease up to `wanted` of the `limit` bytes of KV memory of the tenant over all replicas, in place of the
        earlier lease.

        Returns the bytes granted, and the seconds from the call for which they are. The leases of all replicas never
        add up to more than the last limit.
        """
        numbers = (wanted, limit, round(self.lease * 1e6))
        key = f"{state_key(tenant)}:kv".encode()
        words = (self.replica.encode(), *(b"%d" % number for number in numbers))
        answer = await self._runner.call(Script.LEASE_KV, (key,), *words)
        return int(answer[0]), self.lease

    def served_sums(self, fleet: str) -> ServedSums:
        """A view of all replicas' service of each tenant: see `ServedSums`."""
        return ServedSums(self._runner, fleet)

    def announcements(self, fleet: str) -> Announcements:
        """The announcements of a fleet's replicas: see `Announcements`."""
        return Announcements(self._runner, fleet)

    def responses(self) -> ResponseStore:
        """Return the tenants' stored responses."""
        return ResponseStore(self._runner, self.lease)

    def batches(self) -> BatchStore:
        """Return the tenants' files and batches."""
        return BatchStore(self._runner, self.lease)

    async def finish_line(
        self, tenant: str, key: str, limits: tuple[Limit, ...], line: FinishedLine, used: Usage
    ) -> bool:
        """Settle a line of a batch once. Its tokens are charged, also beyond the limits, and its use is booked. Returns
        False if another replica has the batch by now.
        """
        account = self._account(tenant, key, limits)
        is_settled, levels = await self._replica.finish_line(account, line, used)
        self.alerts.check(account, levels)
        return is_settled

    async def heartbeat(self) -> None:
        """Renew this replica's leases and slices, and send progress and bookings. It has to be called three times a
        lease or more often.
        """
        self._forget_idle()
        await in_order(self._replica.heartbeat, self._fallback.reconcile, self.ledger.flush)

    def _account(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> QuotaAccount:
        if limits and limits[-1].session is not None:
            return self._account_of_session(tenant, key, limits)
        name = tenant, key, _priced_model(limits)
        account = self._accounts.get(name)
        if account is None or not (account.limits is limits or account.limits == limits):
            older, account = account, self._new_account(tenant, key, limits)
            if older is not None:
                account.carry_over(older)
                self._fallback.slices.replace(older, account)
            self._accounts[name] = account
        account.last_used = self._monotonic()
        return account

    def _account_of_session(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> QuotaAccount:
        """Accounts of sessions, which clients name as they like, are bounded by their number."""
        account = self._sessions.pop((tenant, key, limits), None) or self._new_account(tenant, key, limits)
        self._sessions[tenant, key, limits] = account
        account.last_used = self._monotonic()
        if len(self._sessions) > MAX_SESSIONS:
            oldest = next((name for name, one in self._sessions.items() if not one.reservations), None)
            if oldest is not None:
                self._fallback.slices.forget(self._sessions.pop(oldest))
        return account

    def _new_account(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> QuotaAccount:
        return QuotaAccount(tenant, key, limits, self._replica.id, self._replica.lease)

    def _forget_idle(self) -> None:
        """Drop the accounts whose state in the store has expired."""
        now = self._monotonic()
        for accounts in (self._accounts, self._sessions):
            idle = [
                name
                for name, account in accounts.items()
                if now > account.last_used + account.life and not account.reservations
            ]
            for name in idle:
                self._fallback.slices.forget(accounts.pop(name))


def _priced_model(limits: Sequence[Limit]) -> str:
    """The model at whose prices limits count, if it has prices of its own."""
    return next((limit.prices.model for limit in limits if limit.prices is not None), "")
