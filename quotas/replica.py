"""What this process holds at the store, and how the two come to agree again after a crash, an outage or a loss."""

import asyncio
import secrets
from collections.abc import Coroutine, Iterable
from typing import Any

from quotas.account import Account, Figures, Held, replica_field
from quotas.errors import ConnectionLost, StoreFault
from quotas.reservation import NOTHING, Ask, Usage
from quotas.script_runner import ScriptRunner
from quotas.scripts import Script

ATTEMPTS = 4  # of a call that the store answers with the wish for another one first
NO_ASK = Ask(0, 0, 0)
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

    def holds(self, reservation_id: str) -> tuple[Account, Held] | None:
        return self._held.get(reservation_id)

    async def take(self, account: Account, held: Held) -> tuple[bool, Figures]:
        """Reserve what `held` asks; whether it was granted, and the figures."""
        self._held[held.reservation.id] = account, held
        account.held[held.reservation.id] = held
        try:
            status, figures = await self._decide(Script.RESERVE, account, held.reservation.ask, held.field)
        except BaseException:  # whatever interrupts, it may have been charged
            self._uncertain.add(account.state)
            self._let_go(account, held)
            raise
        if status == b"OK":
            held.granted = True
            held.first = held.last = figures.now // DAY
        else:
            self._let_go(account, held)
        return held.granted, figures

    async def extend(self, account: Account, held: Held, ask: Ask) -> tuple[bool, Figures]:
        """Raise the output to that of `ask`."""
        status, figures = await self._decide(Script.EXTEND, account, ask, held.field)
        if status == b"OK":
            self._note_extension(held, ask, figures.now // DAY)
        return status == b"OK", figures

    async def look(self, account: Account) -> Figures:
        source = self._runner.scripts[Script.STATES]
        answer = await self._runner.run(Script.STATES, account.command(Script.STATES, source, NO_ASK, b"-"))
        return account.figures(answer)

    async def _decide(self, script: Script, account: Account, ask: Ask, field: bytes) -> tuple[bytes, Figures]:
        """Run a script of an account, doing first what the store asks for."""
        source = self._runner.scripts[script]
        for _ in range(ATTEMPTS):
            known = account.generation
            answer = await self._runner.run(script, account.command(script, source, ask, field))
            match answer[0]:
                case b"LOST" if account.generation == known:
                    await self._restore(account, lost=True)
                case b"LOST":
                    pass  # another call has restored it meanwhile
                case b"RECLAIM":
                    await self.reclaim(account.state)
                case b"GONE":
                    await self.beat(account)
                case status:
                    return status, account.see(answer)
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
        self._let_go(account, held)

    async def heartbeat(self) -> None:
        overdue = [pair for pair in self._held.values() if pair[1].settling]
        await _all(self.settle(account, held) for account, held in overdue)
        await _all(self.beat(account) for account in {account: None for account, _ in self._held.values()})
        await _all(self.reclaim(state) for state in list(self._uncertain))

    async def beat(self, account: Account, ending: Held | None = None) -> None:
        """Renew the lease and report progress; put back what the store does not have of it.

        A reservation that is being settled is left out, unless it is `ending`: the store may rightly have it no more.
        """
        named = {held.field: held for held in account.held.values() if held.is_running or held is ending}
        progress = {field: held.reservation.progress for field, held in named.items()}
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
        records = [word for held in running if only is None or held.field in only for word in account.record(held)]
        seen = account.seen if lost else None
        figures = seen.used if seen else (0,) * len(account.limits)
        rest = [*_numbers(seen.now if seen else 0, *figures), *records]
        field = f"r:{self.next_id()}".encode()
        source = self._runner.scripts[Script.RESTORE]
        answer = await self._runner.run(Script.RESTORE, account.command(Script.RESTORE, source, NO_ASK, field, rest))
        account.see(answer)

    async def _settled(self, account: Account, held: Held) -> bytes:
        used = held.used or NOTHING
        arguments = (held.field, *_numbers(used.requests), *_tokens(used), *_numbers(round(used.kv_byte_seconds)))
        call = self._runner.call_once
        try:
            return (await call(Script.SETTLE, (account.state,), *arguments))[0]
        except ConnectionLost:
            held.settling = True
            return (await call(Script.SETTLE, (account.state,), *arguments))[0]

    @staticmethod
    def _note_extension(held: Held, ask: Ask, today: int) -> None:
        more = ask.output_tokens - held.reservation.ask.output_tokens
        if today != held.first:
            held.late = (held.late if today == held.last else 0) + more
            held.last = today
        held.reservation.ask = ask

    def _let_go(self, account: Account, held: Held) -> None:
        self._held.pop(held.reservation.id, None)
        account.held.pop(held.reservation.id, None)


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; raise the first failure when all are done."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _numbers(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def _tokens(usage: Usage) -> list[bytes]:
    return _numbers(usage.input_tokens, usage.cached_tokens, usage.output_tokens)
