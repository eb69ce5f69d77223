"""This process's reservations at the store, and their reconciliation after a crash, an outage or a loss."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from quotas.errors import ConnectionLost, NotSent, QuotaError, StoreFault, StoreUnavailable
from quotas.reservation import NOTHING, Ask, Attempt, Usage
from quotas.store.account import Levels, QuotaAccount, TrackedReservation, letter_of_money, replica_field
from quotas.store.batches import FinishedLine
from quotas.store.replica_name import ReplicaName
from quotas.store.scripts import Script, ScriptRunner

RESTORED_AT_ONCE = 1000  # reservations: one script is short, and Lua unpacks at most 8,000 words
RENEWED_AT_ONCE = 500  # reservations: some 5 ms of the store, during which it answers nobody
MAX_ATTEMPTS = 4  # of a call that needs another one first
CALLS_AT_ONCE = 256  # so that the loop takes turns between them
NO_ASK = Ask(0, 0, 0)
CHARGE_HELD, CHARGE_RECLAIMED, CHARGE_ALL = b"held", b"reclaimed", b"all"  # of reservations: see lua/restore.lua


class ReplicaReservations:
    """The reservations of one process.

    The store names them by the process and an ascending ordinal, so that a reservation in the store unknown to this
    replica is abandoned: by this life of it, or by an earlier one, whose slices are given back with the first call
    about a tenant.
    """

    def __init__(self, runner: ScriptRunner, lease: float, name: ReplicaName) -> None:
        self.id = name.id
        self.lease = lease
        self._runner = runner
        self._first = self._ordinal = name.first_ordinal
        self._met: set[bytes] = set()  # states cleared of earlier lives' reservations
        self._reservations: dict[str, tuple[QuotaAccount, TrackedReservation]] = {}
        self._fields: dict[bytes, dict[str, bytes]] = {}  # of the reservations of each state, by their ids
        self._uncertain: set[bytes] = set()  # states that may hold an abandoned reservation of ours

    def next_id(self, attempt: Attempt | None = None) -> str:
        self._ordinal += 1
        return f"{self.id}.{self._ordinal}" if attempt is None else f"{self.id}.{self._ordinal}.{attempt.request}"

    @property
    def num_unsettled(self) -> int:
        """The number of reservations that are not settled yet."""
        return len(self._reservations)

    def find(self, reservation_id: str) -> tuple[QuotaAccount, TrackedReservation] | None:
        """The account and state of an unsettled reservation."""
        return self._reservations.get(reservation_id)

    async def reserve(self, account: QuotaAccount, tracked: TrackedReservation) -> tuple[bool, Levels]:
        """Ask the store for the reservation. Returns whether it was granted, and the levels."""
        self._track(account, tracked)
        try:
            answer = await self._decide(Script.RESERVE, account, tracked.reservation.ask, tracked.field)
        except BaseException as error:  # after any interruption it may have been charged
            self._uncertain.add(account.state)
            self.forget(account, tracked)
            if isinstance(error, asyncio.CancelledError):  # a disconnected client is not to hold its limits for seconds
                self._runner.submit(Script.SETTLE, self._settlement(account, tracked), lambda _: None)
            raise
        levels = account.remember(answer)
        if answer[0] == b"OK":
            tracked.granted = True
            tracked.first = tracked.last = levels.quarter
        else:
            self.forget(account, tracked)
        return tracked.granted, levels

    async def supersede(self, account: QuotaAccount, attempt: Attempt) -> None:
        """Undo the charges of a request's earlier attempts at any replica, without settling them."""
        await self._runner.call(Script.SUPERSEDE, (account.state,), attempt.request.encode())

    def add_local(self, account: QuotaAccount, tracked: TrackedReservation) -> None:
        """Grant a reservation without the store; `adopt` hands it over later."""
        tracked.is_local = True
        self._track(account, tracked)

    async def extend(self, account: QuotaAccount, tracked: TrackedReservation, ask: Ask) -> tuple[bool, Levels]:
        """Raise the reserved output to that of `ask`. Returns whether it was granted, and the levels."""
        answer = await self._decide(Script.EXTEND, account, ask, tracked.field)
        levels = account.remember(answer)
        if answer[0] == b"OK":
            self._note_extension(tracked, ask, levels.quarter)
        return answer[0] == b"OK", levels

    async def levels(self, account: QuotaAccount) -> Levels:
        """Ask the store for the levels of the account's limits."""
        return Levels.of(await self._decide(Script.STATES, account, NO_ASK, b"-"))

    async def slice(self, account: QuotaAccount, field: bytes, numbers: Sequence[int]) -> tuple[int, ...]:
        """Ask the store to set a slice aside, as lua/slice.lua takes it. Returns the amounts it holds, then their
        targets.
        """
        return Levels.of(await self._decide(Script.SLICE, account, NO_ASK, field, _numbers(*numbers))).numbers

    async def charge(self, account: QuotaAccount, row: str | None, sender: bytes, ordinal: int, used: Usage) -> None:
        """Charge usage that was not reserved, and book it in a row, once for each ordinal of the sender."""
        ask = Ask(used.requests, used.input_tokens, used.output_tokens, row=row)
        rest = _numbers(ordinal, used.cached_tokens, round(used.kv_byte_seconds), used.reasoning_tokens)
        account.remember(await self._decide(Script.CHARGE, account, ask, sender, rest))

    async def finish_line(self, account: QuotaAccount, line: FinishedLine, used: Usage) -> tuple[bool, Levels]:
        """See `RedisStore.finish_line`. Returns whether the batch is still ours, and the levels."""
        numbers = _numbers(used.requests, used.cached_tokens, round(used.kv_byte_seconds), used.reasoning_tokens)
        how = b"completed" if line.is_completed else b"failed"
        money = b"" if line.prices is None else letter_of_money(line.prices).encode()
        place = line.batch.encode(), *_numbers(line.epoch, line.number), how
        rest = (*place, *numbers, *_numbers(line.result_bytes), money)
        ask = Ask(0, used.input_tokens, used.output_tokens, row=line.row)
        answer = await self._decide(Script.FINISH_LINE, account, ask, b"-", rest)
        return answer[0] == b"OK", account.remember(answer)

    async def adopt(self, account: QuotaAccount) -> list[TrackedReservation]:
        """Have the store take over the local reservations, also beyond its limits, and return them; `settle_ended`
        settles the ended ones.

        After an interruption a later call takes them over, once.
        """
        await self.renew(account)  # a store that lost its state is told the rest first
        taken = [tracked for tracked in account.reservations.values() if tracked.is_local]
        for tracked in taken:
            tracked.is_offered = True
        await self._put_back(account, taken, CHARGE_ALL)
        for tracked in taken:
            tracked.is_local, tracked.granted = False, True
        return taken

    async def settle_ended(self, account: QuotaAccount, taken: Iterable[TrackedReservation]) -> None:
        """Settle reservations that ended before the store took them over; the next heartbeat retries failures."""
        await all_of(self.settle(account, tracked) for tracked in taken if tracked.used is not None)

    async def _decide(
        self, script: Script, account: QuotaAccount, ask: Ask, field: bytes, rest: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Run a script of an account, after the calls that the store demands first."""
        for state in (account.state, *account.shared):
            if self._first and state not in self._met:
                await self.reclaim(state)
                self._met.add(state)
        source = self._runner.scripts[script]
        for _ in range(MAX_ATTEMPTS):
            known = account.generation
            answer = await self._runner.run(script, account.command(script, source, ask, field, rest))
            match answer[0]:
                case b"LOST" if account.generation == known:
                    await self._restore(account, lost=True)
                case b"LOST":
                    pass  # another call has restored it meanwhile
                case b"RECLAIM":
                    await self.reclaim(answer[1], account.shared if answer[1] == account.state else ())
                case b"GONE":
                    await self.renew(account)
                case _:
                    return answer
        raise StoreFault(f"the quota store did not {script} in {MAX_ATTEMPTS} attempts")

    async def settle(self, account: QuotaAccount, tracked: TrackedReservation) -> None:
        """Settle an ended reservation. If this is interrupted, the next heartbeat does it."""
        try:
            if not await self._settled(account, tracked):
                await self.renew(account, tracked)
                await self._settled(account, tracked)
        except BaseException:
            tracked.is_overdue = True
            raise
        self.forget(account, tracked)

    def settle_soon(
        self,
        account: QuotaAccount,
        tracked: TrackedReservation,
        done: Callable[[QuotaError | None], object],
        again: Callable[[], object],
    ) -> bool:
        """Settle an ended reservation without a task that waits.

        `done` is called if nothing is left to do now, with an error worth a warning, and `again` if `settle` has to be
        called. Returns whether there is a connection.
        """

        def answered(answer: list[bytes] | Exception) -> None:
            tracked.is_settle_sent = tracked.is_overdue = isinstance(answer, QuotaError)
            match answer:
                case [b"OK"]:
                    self.forget(account, tracked)
                    done(None)
                case StoreFault():
                    done(answer)
                case StoreUnavailable() if not isinstance(answer, ConnectionLost):
                    done(None)  # the next heartbeat settles it
                case _:
                    again()

        return self._runner.submit(Script.SETTLE, self._settlement(account, tracked), answered)

    async def heartbeat(self) -> None:
        await in_order(self._settle_overdue, self._renew_all, self._reclaim_uncertain)

    async def _settle_overdue(self) -> None:
        overdue = [pair for pair in self._reservations.values() if pair[1].is_overdue]
        await all_of(self.settle(account, tracked) for account, tracked in overdue)

    async def _renew_all(self) -> None:
        await all_of(self.renew(account) for account in {account: None for account, _ in self._reservations.values()})

    async def _reclaim_uncertain(self) -> None:
        await all_of(self.reclaim(state) for state in list(self._uncertain))

    async def renew(self, account: QuotaAccount, ending: TrackedReservation | None = None) -> None:
        """Renew the lease, report progress, and restore reservations that the store lacks, some at a time.

        A reservation being settled is left out, unless it is `ending`: the store may rightly lack it.
        """
        waiting = [tracked for tracked in account.reservations.values() if tracked.is_running or tracked is ending]
        unknown = set[bytes]()
        for first in range(0, max(len(waiting), 1), RENEWED_AT_ONCE):
            some = waiting[first : first + RENEWED_AT_ONCE]
            missing = await self._renew(account, [one for one in some if one.is_running or one is ending])
            if missing is None:
                await self._restore(account, lost=True, ending=ending)
                return
            unknown |= missing
        if unknown:
            await self._restore(account, lost=False, ending=ending, only=unknown)

    async def _renew(self, account: QuotaAccount, some: Iterable[TrackedReservation]) -> set[bytes] | None:
        """Renew the lease and report the progress of some reservations. Returns the fields of reservations that the
        store lacks; None if it has lost the tenant's state.
        """
        progress = [(tracked, tracked.progress) for tracked in some]
        reports = [word for tracked, usage in progress for word in (tracked.field, *_tokens(usage))]
        head = (account.generation, replica_field(self.id))
        lives = _numbers(round(self.lease * 1e6), round(account.life * 1e3))
        status, *unknown = await self._runner.call(Script.HEARTBEAT, (account.state,), *head, *lives, *reports)
        if status == b"LOST":
            return None
        missing = set(unknown)
        for tracked, usage in progress:
            if tracked.field not in missing:
                tracked.booked = usage
        return missing

    async def reclaim(self, state: bytes, shared: tuple[bytes, ...] = ()) -> None:
        """Settle dead replicas' reservations of this tenant, and unknown ones in our name, a part of them at a time; of
        a team, those of its tenants. `shared` are the states of a tenant's teams, which are told of it.
        """
        self._uncertain.discard(state)
        status, members = b"AGAIN", list[bytes]()
        try:
            while status == b"AGAIN" or members:
                await all_of(self.reclaim(member, (state,)) for member in members)
                bounds = _numbers(round(self.lease * 1e6), self._ordinal + 1, self._first)
                live = self._fields.get(state, {}).values()
                keys = (state, *shared)
                status, *members = await self._runner.call(Script.RECLAIM, keys, self.id.encode(), *bounds, *live)
        except BaseException:
            self._uncertain.add(state)
            raise

    async def _restore(
        self,
        account: QuotaAccount,
        lost: bool,
        ending: TrackedReservation | None = None,
        only: set[bytes] | None = None,
    ) -> None:
        """Put back our reservations: all, with the levels last seen, if state was lost, else those of `only`."""
        running = [tracked for tracked in account.reservations.values() if tracked.is_running or tracked is ending]
        known = [tracked for tracked in running if only is None or tracked.field in only]
        if lost and account.last_levels:
            await self._put_back(account, known, CHARGE_HELD, account.last_levels)
        else:
            await self._put_back(account, known, CHARGE_RECLAIMED)

    async def _put_back(
        self, account: QuotaAccount, known: list[TrackedReservation], charge: bytes, lost: Levels | None = None
    ) -> None:
        """Restore the reservations, and the `lost` levels, which include them."""
        source = self._runner.scripts[Script.RESTORE]
        figures = none = (0,) * (1 + len(account.limits))
        if lost is not None:
            figures = (lost.now, *account.used(lost))
        for first in range(0, max(len(known), 1), RESTORED_AT_ONCE):
            some = known[first : first + RESTORED_AT_ONCE]
            records = [word for tracked in some for word in account.record(tracked)]
            rest = [charge, *_numbers(*(none if first else figures)), *records]
            field = f"r:{self.next_id()}".encode()
            command = account.command(Script.RESTORE, source, NO_ASK, field, rest)
            answer = await self._runner.run(Script.RESTORE, command)
            if charge != CHARGE_HELD:
                for tracked in some:
                    tracked.charged_again(Levels.of(answer).quarter)
        account.remember(answer)  # not before: a restoration that was interrupted begins again

    async def _settled(self, account: QuotaAccount, tracked: TrackedReservation) -> bool:
        """Send the settlement. Returns False if the reservation has to be restored first."""
        command, was_sent = self._settlement(account, tracked), tracked.is_settle_sent
        tracked.is_settle_sent = True
        try:
            answer = await self._runner.run_once(Script.SETTLE, command)
        except ConnectionLost:
            was_sent = True
            answer = await self._runner.run_once(Script.SETTLE, command)
        except NotSent:
            tracked.is_settle_sent = was_sent
            raise
        return answer[0] == b"OK" or (answer[0] == b"GONE" and was_sent)

    def _settlement(self, account: QuotaAccount, tracked: TrackedReservation) -> bytes:
        return account.settlement(self._runner.scripts[Script.SETTLE], tracked.field, tracked.used or NOTHING)

    @staticmethod
    def _note_extension(tracked: TrackedReservation, ask: Ask, quarter: int) -> None:
        more = ask.output_tokens - tracked.reservation.ask.output_tokens
        if quarter != tracked.first:
            tracked.last_output = (tracked.last_output if quarter == tracked.last else 0) + more
            tracked.last = quarter
        tracked.reservation.ask = ask

    def _track(self, account: QuotaAccount, tracked: TrackedReservation) -> None:
        name = tracked.reservation.id
        self._reservations[name] = account, tracked
        account.reservations[name] = tracked
        self._fields.setdefault(account.state, {})[name] = tracked.field

    def forget(self, account: QuotaAccount, tracked: TrackedReservation) -> None:
        self._reservations.pop(tracked.reservation.id, None)
        account.reservations.pop(tracked.reservation.id, None)
        fields = self._fields.get(account.state, {})
        fields.pop(tracked.reservation.id, None)
        if not fields:
            self._fields.pop(account.state, None)


async def all_of(calls: Iterable[Coroutine[Any, Any, None]], at_once: int = CALLS_AT_ONCE) -> None:
    """Run the calls, some at once; raise the first failure when all are done."""
    waiting, failures = iter(calls), list[BaseException]()
    while some := list(islice(waiting, at_once)):
        results = await asyncio.gather(*some, return_exceptions=True)
        failures += [result for result in results if isinstance(result, BaseException)]
    for failure in failures:
        raise failure


async def in_order(*steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the steps one after another, each of them though one before failed; raise the first failure at the end."""
    await all_of((step() for step in steps), at_once=1)


def _numbers(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def _tokens(usage: Usage) -> list[bytes]:
    return _numbers(usage.input_tokens, usage.cached_tokens, usage.output_tokens)
