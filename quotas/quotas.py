"""The quotas of requests: a grant, from before a request runs until its usage is settled."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from quotas.errors import BudgetSpent, LimitExceeded, QuotaError, QuotaRefused, StoreUnavailable
from quotas.policy.limit import Budget, Limit, Rate, Resource
from quotas.policy.policy import Outage
from quotas.reservation import NOTHING, Ask, LimitState, RequestDurations, Reservation, Usage
from quotas.store.redis_store import RedisStore

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.0  # for the last settlements of a stopping gateway


@dataclass(slots=True, eq=False)
class Grant:
    """A request's right to run, which its holder ends after every outcome of the request.

    The holder sets `measure`, which returns the request's usage so far.
    """

    quotas: "Quotas"
    name: str
    key: str | None
    reservation: Reservation | None = None  # None: no limit counts its usage
    row: str | None = None  # of the ledger, if there is no reservation; None: its key's
    measure: Callable[[], Usage] = field(default=lambda: NOTHING)
    settlement: "asyncio.Future[None] | None" = None  # done once the store settled it, or failed to answer
    is_settled: bool = False

    @property
    def states(self) -> tuple[LimitState, ...]:
        """The state of each limit that the request was charged to, as of the charge."""
        return self.reservation.states if self.reservation else ()

    async def extend(self, output_tokens: int) -> None:
        """Reserve more output. Raises `QuotaRefused`, having charged nothing, or `StoreUnavailable`."""
        if self.reservation is not None:
            await self.quotas.store.extend(self.reservation, output_tokens)

    def settle(self) -> None:
        """Return the unused part, and book the usage. It does not wait for the store; idempotent."""
        if not self.is_settled:
            self.is_settled = True
            self.quotas.settle(self)

    def close(self) -> None:
        """Settle, and record the end of the request."""
        self.settle()
        self.quotas.ended(self)


class Quotas:
    """Holds requests to the limits of tenants, keys and teams. One event loop owns it; `run` is a task beside it."""

    def __init__(self, store: RedisStore, heartbeat: float) -> None:
        """`heartbeat` is the seconds between two heartbeats: a third of the store's lease, or less."""
        self.store = store
        self._heartbeat = heartbeat
        self._live: dict[Grant, float] = {}  # grants counted by limits, with their moments
        self._settling: set[asyncio.Future[None]] = set()
        self._clock = asyncio.get_running_loop().time
        self._durations = RequestDurations()
        self.refused: set[tuple[str, str | None]] = set()  # tenants and keys whose last request was refused
        self.on_refused: list[Callable[[str, str | None], object]] = []  # called with each addition

    async def reserve(self, name: str, key: str | None, limits: tuple[Limit, ...], ask: Ask, outage: Outage) -> Grant:
        """Charge `ask` to `limits`, all limits of the tenant `name`, this key and the team, or raise `QuotaRefused`.

        An attempt among several is stored even if no limit counts it. While the store is away, `outage` decides: it
        then raises `StoreUnavailable`, or grants (quotas/store/outage.py).
        """
        if not limits and ask.attempt is None:
            return Grant(self, name, key, row=ask.row)
        grant = Grant(self, name, key, await self._reserve(name, key, limits, ask, outage))
        self.refused.discard((name, key))
        self._live[grant] = self._clock()
        return grant

    def was_refused(self, name: str, key: str | None) -> bool:
        """True if the last request of the tenant with this key was refused."""
        return (name, key) in self.refused

    async def refuse_spent(self, name: str, key: str | None, limits: tuple[Limit, ...], ask: Ask) -> None:
        """Raise `QuotaRefused` if any limit has less left than `ask`, which is at most one of each.

        Nothing is charged. Raises `StoreUnavailable`.
        """
        states = await self.store.states(name, key, limits) if limits else ()
        spent = [state for state in states if state.remaining < ask.of(state.limit) and not state.limit.is_soft]
        if spent:
            refusal = _refusal(max(spent, key=_wait), ask)
            refusal.measure = lambda: states
            raise self._with_wait(name, refusal)
        self.refused.discard((name, key))

    def ended(self, grant: Grant) -> None:
        """Record the end and the duration of the request."""
        since = self._live.pop(grant, None)
        if since is not None:
            self._durations.observe(grant.name, self._clock() - since)

    def settle(self, grant: Grant) -> None:
        usage = grant.measure()
        if grant.reservation is None:
            self.store.book(grant.name, grant.key, usage, grant.row)
            return
        grant.reservation.progress = usage
        settlement = grant.settlement = asyncio.get_running_loop().create_future()
        self._settling.add(settlement)
        self.store.settle_soon(grant.reservation, usage, partial(self._settled, settlement))

    async def run(self) -> None:
        """Renew this replica's leases for as long as the server runs, and reconcile at once when the store is back."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):  # Python 3.11's `wait_for` may drop a cancellation
                    await self.store.returned.wait()
            self.store.returned.clear()
            try:
                await self._beat()
            except StoreUnavailable:
                pass  # the store's client logs it once
            except QuotaError as error:
                log.warning("the quota store rejected a heartbeat: %s", error)

    async def close(self) -> None:
        """Send pending settlements, if the store answers within `SETTLE_SECONDS`, and close the store.

        It is called once every request has ended.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._settle_all()
        await self.store.close()

    async def _settle_all(self) -> None:
        if self._settling:
            await asyncio.wait(self._settling)
        while True:
            self.store.returned.clear()
            try:
                await self.store.heartbeat()
            except StoreUnavailable:
                await self.store.returned.wait()
            except QuotaError as error:
                log.error("some usage was not sent to the quota store: %s", error)
                return
            else:
                return

    async def _beat(self) -> None:
        for grant in self._live:
            assert grant.reservation is not None
            grant.reservation.progress = grant.measure()
        await self.store.heartbeat()

    async def _reserve(
        self, name: str, key: str | None, limits: tuple[Limit, ...], ask: Ask, outage: Outage
    ) -> Reservation:
        try:
            return await self.store.reserve(name, key, limits, ask, outage)
        except (LimitExceeded, BudgetSpent) as refusal:
            self._note_refused(name, key)
            raise self._with_wait(name, refusal) from None

    def _note_refused(self, name: str, key: str | None) -> None:
        if (name, key) not in self.refused:
            for listener in self.on_refused:
                listener(name, key)
            self.refused.add((name, key))

    def _with_wait(self, name: str, refusal: QuotaRefused) -> QuotaRefused:
        """Give a refusal at the concurrency limit the expected wait for the tenant's next end of a request."""
        if refusal.limit.resource is not Resource.CONCURRENT_REQUESTS:
            return refusal
        wait = self._durations.until_next_end(name, refusal.limit.amount)
        waiting = LimitExceeded(refusal.limit, refusal.asked, refusal.left, wait)
        waiting.measure = refusal.measure
        return waiting

    def _settled(self, settlement: "asyncio.Future[None]", error: BaseException | None) -> None:
        self._settling.discard(settlement)
        settlement.set_result(None)
        if error is not None:
            log.warning("a settlement waits for the next heartbeat: %s", error)


def _wait(state: LimitState) -> float:
    """The known or expected seconds until the limit has one unit again."""
    limit = state.limit
    match limit.window:
        case Rate(seconds=seconds):
            return max(0.0, state.reset - (limit.capacity - 1) * seconds / limit.amount)
        case Budget():
            return state.reset
    return 0.0


def _refusal(state: LimitState, ask: Ask) -> QuotaRefused:
    """The refusal of a limit that lacks the one unit asked for."""
    limit, asked, wait = state.limit, ask.of(state.limit), _wait(state)
    if isinstance(limit.window, Budget):
        return BudgetSpent(limit, asked, state.remaining, time.time() + wait)
    return LimitExceeded(limit, asked, state.remaining, wait if limit.window else None)
