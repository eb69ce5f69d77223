"""What this process holds at the store, and how the two come to agree again after a crash, an outage or a loss."""

import asyncio
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from quotas.errors import ConnectionLost, StoreFault
from quotas.reservation import NOTHING, Ask, Usage
from quotas.store.account import Account, Figures, Held, replica_field
from quotas.store.scripts import Script, ScriptRunner

ATTEMPTS = 4  # of a call that the store answers with the wish for another one first
NO_ASK = Ask(0, 0, 0)
AGAIN, ANEW = 0, -1  # how lua/restore.lua charges: what a reclaim gave back, or all
DAY = 86_400_000_000  # microseconds


class Replica:
    """Reservations of one process. The store knows them by its random id and an ordinal that only grows, so that what
    the store keeps and this replica does not name is known to be abandoned.
    """

    def __init__(self, runner: ScriptRunner, lease: float) -> None:
        self.id = secrets.token_hex(8)
        self.lease = lease
        self._runner = runner
        self._ordinal = 0
        self._held: dict[str, tuple[Account, Held]] = {}
        self._uncertain: set[bytes] = set()  # states that may keep a reservation of ours that nobody holds

    def next_id(self) -> str:
        self._ordinal += 1
        return f"{self.id}.{self._ordinal}"

    @property
    def num_held(self) -> int:
        """Reservations that are not settled yet."""
        return len(self._held)

    def holds(self, reservation_id: str) -> tuple[Account, Held] | None:
        return self._held.get(reservation_id)

    async def take(self, account: Account, held: Held) -> tuple[bool, Figures]:
        """Reserve what `held` asks; whether it was granted, and the figures."""
        self._held[held.reservation.id] = account, held
        account.held[held.reservation.id] = held
        try:
            answer = await self._decide(Script.RESERVE, account, held.reservation.ask, held.field)
        except BaseException:  # whatever interrupts, it may have been charged
            self._uncertain.add(account.state)
            self.let_go(account, held)
            raise
        figures = account.see(answer)
        if answer[0] == b"OK":
            held.granted = True
            held.first = held.last = figures.now // DAY
        else:
            self.let_go(account, held)
        return held.granted, figures

    def take_locally(self, account: Account, held: Held) -> None:
        """Grant what `held` asks without the store, which is to `adopt` it later."""
        held.is_local = True
        self._held[held.reservation.id] = account, held
        account.held[held.reservation.id] = held

    async def extend(self, account: Account, held: Held, ask: Ask) -> tuple[bool, Figures]:
        """Raise the output to that of `ask`."""
        answer = await self._decide(Script.EXTEND, account, ask, held.field)
        figures = account.see(answer)
        if answer[0] == b"OK":
            self._note_extension(held, ask, figures.now // DAY)
        return answer[0] == b"OK", figures

    async def look(self, account: Account) -> Figures:
        return Figures.of(await self._decide(Script.STATES, account, NO_ASK, b"-"))

    async def slice(self, account: Account, field: bytes, numbers: Sequence[int]) -> tuple[int, ...]:
        """Have a slice set aside, as lua/slice.lua is told it; what it holds, and what it is due."""
        return Figures.of(await self._decide(Script.SLICE, account, NO_ASK, field, _numbers(*numbers))).numbers

    async def charge(self, account: Account, debtor: bytes, ordinal: int, used: Usage) -> None:
        """Charge and book what the store was not asked for, once for each ordinal of the debtor."""
        ask = Ask(used.requests, used.input_tokens, used.output_tokens)
        rest = _numbers(ordinal, used.cached_tokens, round(used.kv_byte_seconds))
        account.see(await self._decide(Script.CHARGE, account, ask, debtor, rest))

    async def adopt(self, account: Account) -> list[Held]:
        """Have the store take over what was granted locally, whatever its limits hold now; what was taken over.

        What is interrupted is taken over by a later call, once.
        """
        await self.beat(account)  # a store that lost its state is told the rest first
        today = (await self.look(account)).now // DAY
        taken = [held for held in account.held.values() if held.is_local]
        for held in taken:
            held.is_offered = True
            held.first = held.last = today
        await self._put_back(account, taken, ANEW)
        for held in taken:
            held.is_local, held.granted = False, True
        await all_of(self.settle(account, held) for held in taken if held.used is not None)
        return taken

    async def _decide(
        self, script: Script, account: Account, ask: Ask, field: bytes, rest: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Run a script of an account, doing first what the store asks for."""
        source = self._runner.scripts[script]
        for _ in range(ATTEMPTS):
            known = account.generation
            answer = await self._runner.run(script, account.command(script, source, ask, field, rest))
            match answer[0]:
                case b"LOST" if account.generation == known:
                    await self._restore(account, lost=True)
                case b"LOST":
                    pass  # another call has restored it meanwhile
                case b"RECLAIM":
                    await self.reclaim(account.state)
                case b"GONE":
                    await self.beat(account)
                case _:
                    return answer
        raise StoreFault(f"the quota store did not {script} in {ATTEMPTS} attempts")

    async def settle(self, account: Account, held: Held) -> None:
        """Settle what is over. What interrupts this leaves it to the next heartbeat."""
        try:
            if await self._settled(account, held) == b"GONE" and not held.settling:
                await self.beat(account, held)
                await self._settled(account, held)
        except BaseException:
            held.settling = True
            raise
        self.let_go(account, held)

    async def heartbeat(self) -> None:
        overdue = [pair for pair in self._held.values() if pair[1].settling]
        await all_of(self.settle(account, held) for account, held in overdue)
        await all_of(self.beat(account) for account in {account: None for account, _ in self._held.values()})
        await all_of(self.reclaim(state) for state in list(self._uncertain))

    async def beat(self, account: Account, ending: Held | None = None) -> None:
        """Renew the lease and report progress; put back what the store does not have of it.

        A reservation that is being settled is left out, unless it is `ending`: the store may rightly have it no more.
        """
        named = {held.field: held for held in account.held.values() if held.is_running or held is ending}
        progress = {field: held.progress for field, held in named.items()}
        reports = [word for field, usage in progress.items() for word in (field, *_tokens(usage))]
        head = (account.generation, replica_field(self.id))
        lives = _numbers(round(self.lease * 1e6), round(account.life * 1e3))
        answer = await self._runner.call(Script.HEARTBEAT, (account.state,), *head, *lives, *reports)
        if answer[0] == b"LOST":
            await self._restore(account, lost=True, ending=ending)
            return
        unknown = set(answer[1:])
        for field, usage in progress.items():
            if field not in unknown:
                named[field].booked = usage
        if unknown:
            await self._restore(account, lost=False, ending=ending, only=unknown)

    async def reclaim(self, state: bytes) -> None:
        """Settle what dead replicas held of this tenant, and what we do not hold."""
        self._uncertain.discard(state)
        live = [held.field for account, held in self._held.values() if account.state == state]
        bound = _numbers(round(self.lease * 1e6), self._ordinal + 1)
        try:
            await self._runner.call(Script.RECLAIM, (state,), self.id.encode(), *bound, *live)
        except BaseException:
            self._uncertain.add(state)
            raise

    async def _restore(
        self, account: Account, lost: bool, ending: Held | None = None, only: set[bytes] | None = None
    ) -> None:
        """Put back our reservations: all of them with the figures last seen if state was lost, else those of `only`."""
        running = [held for held in account.held.values() if held.is_running or held is ending]
        known = [held for held in running if only is None or held.field in only]
        if lost and account.seen:
            await self._put_back(account, known, account.seen.now, account.used(account.seen))
        else:
            await self._put_back(account, known, AGAIN)

    async def _put_back(
        self, account: Account, known: list[Held], charged: int, figures: Sequence[int] | None = None
    ) -> None:
        """`charged`: when these figures were seen, which count them already; `AGAIN`; `ANEW`."""
        records = [word for held in known for word in account.record(held)]
        rest = [*_numbers(charged, *(figures or (0,) * len(account.limits))), *records]
        field = f"r:{self.next_id()}".encode()
        source = self._runner.scripts[Script.RESTORE]
        answer = await self._runner.run(Script.RESTORE, account.command(Script.RESTORE, source, NO_ASK, field, rest))
        account.see(answer)

    async def _settled(self, account: Account, held: Held) -> bytes:
        used = held.used or NOTHING
        command = account.settlement(self._runner.scripts[Script.SETTLE], held.field, used)
        try:
            return (await self._runner.run_once(Script.SETTLE, command))[0]
        except ConnectionLost:
            held.settling = True
            return (await self._runner.run_once(Script.SETTLE, command))[0]

    @staticmethod
    def _note_extension(held: Held, ask: Ask, today: int) -> None:
        more = ask.output_tokens - held.reservation.ask.output_tokens
        if today != held.first:
            held.late = (held.late if today == held.last else 0) + more
            held.last = today
        held.reservation.ask = ask

    def let_go(self, account: Account, held: Held) -> None:
        self._held.pop(held.reservation.id, None)
        account.held.pop(held.reservation.id, None)


async def all_of(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; raise the first failure when all are done."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _numbers(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def _tokens(usage: Usage) -> list[bytes]:
    return _numbers(usage.input_tokens, usage.cached_tokens, usage.output_tokens)
