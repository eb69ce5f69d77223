"""The ledgers, each of a tenant and a month in UTC: usage by day and row. A row is of an API key, a model and a class,
and of a user and tags as far as the tenant's policy asks. Beside them: for how long replicas have run, by UTC day.
"""

import asyncio
import re
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import date, timedelta
from functools import lru_cache
from itertools import chain
from operator import itemgetter, lt
from typing import Any, NamedTuple
from urllib.parse import unquote

from redis.exceptions import NoPermissionError, ResponseError

from quotas.damage import tell
from quotas.errors import StoreUnsuitable
from quotas.policy.limit import EPOCH
from quotas.reservation import NOTHING, Usage
from quotas.store.account import PREFIX, state_key
from quotas.store.damage import DAMAGE
from quotas.store.redis_link import command
from quotas.store.replica import all_of
from quotas.store.replica_name import ReplicaName
from quotas.store.scripts import Script, ScriptRunner
from quotas.usage_row import UsageRow, rest_name, row_of

ENTRY = struct.Struct("<H7d")  # of lua/ledger.lua
MOST = 2.0**53  # of a count; another is none of ours
MOSTS = (*[MOST] * 4, MOST * 2**26, *[MOST] * 2)  # in their order: KV byte seconds may be more
LEDGERS = b":ledger:"
PATTERN = f"{PREFIX}:{{*}}".encode() + LEDGERS
LEDGER = re.compile(rb"%b:\{([!-z|~]{1,192})\}%b([0-9]{1,6})" % (PREFIX.encode(), LEDGERS))
IN_BATCHES = b"/batch"  # ends the name of a row of use in batches (lua/finish_line.lua); no part of a name has a slash
KEYS_PER_SCAN = b"1000"  # scanned at once, so that other calls do not wait
FIELDS_PER_SCAN = b"300"  # likewise, of each of `LEDGERS_PER_WRITE`
LEDGERS_PER_WRITE = 64
WHOLE = b"0"  # the cursor behind a whole ledger
TENANTS_PER_TURN = 500  # whose batches are closed in some milliseconds, so that other tasks do not wait
MAX_BATCH_ROWS = 1000  # of a tenant, while the store is away or until the next flush; further ones are summed up
LEDGER_LIFE_SECONDS = b"%d" % (400 * 86400)

Ledger = tuple[str, date]
"""The tenant of a ledger, and the first day of its month in UTC."""

Batch = dict[UsageRow, Usage]
"""The usage of one tenant by row."""

Open = dict[str, Usage]
"""The usage of one tenant by the name of its row, to be booked."""


class LedgerRows(NamedTuple):
    """What was read of a ledger. To go through it may take milliseconds, which are for a thread."""

    tenant: str
    month: date
    words: list[bytes]  # fields and their entries in turn; of a field that is there twice, the later counts
    cursor: bytes = WHOLE
    link: int = 0  # the number of the link on which it was begun: a cursor holds on one server
    is_damaged: bool = False  # it is no hash

    def entries(self) -> tuple[dict[bytes, list[bytes]], int]:
        """The entries (`ENTRY`) of each row in parts, by its name; and the number of damaged values, which are left
        out.
        """
        found, num_damaged = dict[bytes, list[bytes]](), 0
        for field, entries in dict(zip(self.words[::2], self.words[1::2], strict=True)).items():
            _, is_row, name = field.partition(b" ")
            if len(entries) % ENTRY.size and is_row:
                self.tell(f"{len(entries)} bytes of {field!r:.200}")
                num_damaged += 1
            elif is_row:
                found.setdefault(name, []).append(entries)
        return found, num_damaged + self.is_damaged

    def by_day(self, first: date, last: date) -> dict[date, Batch]:
        """The usage on these days; an entry with a damaged count is told and left out. A negative count is sound: what
        was booked on the day before may be taken back.
        """
        found = dict[date, Batch]()
        for name, parts in self.entries()[0].items():
            row, in_batches = kind_of(name)
            for number, *counts in chain.from_iterable(map(ENTRY.iter_unpack, parts)):
                if first <= (day := EPOCH + timedelta(days=number)) <= last:
                    if not all(map(lt, map(abs, counts), MOSTS)):  # nan is not
                        self.tell(f"counts of {name!r:.200}")
                        continue
                    batch = found.setdefault(day, {})
                    batch[row] = batch.get(row, NOTHING) + usage_of(map(int, counts), in_batches)
        return found

    def tell(self, what: str) -> None:
        """Tell of damage."""
        tell(_name(self.tenant, self.month), what)


class UsageLedger:
    """The usage that no limit counts, collected and booked in batches, each once even if sent repeatedly.

    There is one per process. Usage that limits count is booked as it is settled.
    """

    def __init__(self, runner: ScriptRunner, name: ReplicaName) -> None:
        self._runner = runner
        self._replica = name.id.encode()
        self._ordinal = name.first_ordinal
        self._open: dict[str, Open] = {}  # by tenant
        self._closed: dict[str, deque[tuple[int, Open]]] = {}  # by tenant, in order: sent, or next
        self._process = f"{name.id}.{name.first_ordinal}".encode()

    def add(self, tenant: str, row: str, usage: Usage) -> None:
        """Add usage of a row, by its name, to be booked by the next `flush`."""
        _add(self._open.setdefault(tenant, {}), row, usage)

    async def flush(self) -> None:
        """Book the added usage. Raises `StoreUnavailable`; unbooked usage is kept for the next call."""
        for number, tenant in enumerate(list(self._open), 1):
            if (batch := self._open.pop(tenant, None)) is not None:
                self._close(tenant, batch)
            if number % TENANTS_PER_TURN == 0:
                await asyncio.sleep(0)
        await all_of(map(self._send, list(self._closed)))

    async def read(self, ledgers: Sequence[Ledger]) -> list[LedgerRows]:
        """Read these ledgers in one write, of a long one the beginning."""
        link = self._runner.client.num_links
        answers = await self._runner.client.send_all([_read(*ledger, WHOLE) for ledger in ledgers])
        return [_rows(ledger, answer, link) for ledger, answer in zip(ledgers, answers, strict=True)]

    async def read_on(self, begun: Sequence[LedgerRows]) -> list[LedgerRows]:
        """Read a further portion of each of these long ledgers, in one write; their words are then the answer's. On a
        new link, as after a failover, they begin again.
        """
        answers = await self._runner.client.send_all([_read(one.tenant, one.month, one.cursor) for one in begun])
        if any(one.link != self._runner.client.num_links for one in begun):
            return await self.read([(one.tenant, one.month) for one in begun])
        further = [_rows(one[:2], answer) for one, answer in zip(begun, answers, strict=True)]
        for one, more in zip(begun, further, strict=True):
            one.words.extend(more.words)
        told = zip(begun, further, strict=True)
        return [one._replace(cursor=more.cursor, is_damaged=more.is_damaged) for one, more in told]

    async def ledgers(self, first: date, last: date) -> list[Ledger]:
        """The ledgers of the months of these days, in the order of their tenants.

        It reads the names of all keys of the database. Raises `StoreUnavailable`, and `StoreUnsuitable` if that is not
        permitted.
        """
        months = {b"%d" % (month - EPOCH).days: month for month in months_of(first, last)}
        found = set[Ledger]()
        async for names in self._names(PATTERN + (b"*" if len(months) > 1 else next(iter(months)))):
            for name in names:
                if (match := LEDGER.fullmatch(name)) and (month := months.get(match[2])):
                    found.add((unquote(match[1].decode()), month))
        return await asyncio.to_thread(lambda: sorted(found, key=itemgetter(0)))

    async def _names(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        asked: asyncio.Task[tuple[bytes, list[bytes]]] | None = self._scan(b"0", pattern)
        try:
            while asked is not None:
                try:
                    cursor, names = await asked
                except NoPermissionError as error:
                    raise StoreUnsuitable(
                        f"to find all tenants, the store's user needs the permission +scan: {error}"
                    ) from error
                asked = None if cursor == b"0" else self._scan(cursor, pattern)  # while these names are read
                yield names
        finally:
            if asked is not None:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    def _scan(self, cursor: bytes, pattern: bytes) -> "asyncio.Task[tuple[bytes, list[bytes]]]":
        scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", KEYS_PER_SCAN)
        return asyncio.create_task(self._runner.client.send(scan))

    async def book_running(self, day: date, seconds: float) -> None:
        """Book for how long this process has run on a UTC day, in all. Raises `StoreUnavailable`."""
        name = _running_name(day)
        await self._runner.client.execute(b"HSET", name, self._process, b"%d" % round(seconds * 1e6))
        await self._runner.client.execute(b"EXPIRE", name, LEDGER_LIFE_SECONDS)

    async def running(self, days: Iterable[date]) -> tuple[list[float], int]:
        """The seconds for which all replicas together have run, on each of these UTC days; and the number of days whose
        value is damaged, which count as 0. Raises `QuotaError`.
        """
        names = [_running_name(day) for day in days]
        answers = await self._runner.client.send_all([command(b"HGETALL", name) for name in names])
        found = [_seconds(name, times) for name, times in zip(names, answers, strict=True)]
        return [seconds or 0.0 for seconds in found], found.count(None)

    def _close(self, tenant: str, batch: Open) -> None:
        """Queue a batch. The first queued one may have been sent, and stays as it is; later usage joins the last while
        the store is away.
        """
        batches = self._closed.setdefault(tenant, deque())
        if len(batches) < 2:
            self._ordinal += 1
            batches.append((self._ordinal, {}))
        _, last = batches[-1]
        for row, usage in batch.items():
            _add(last, row, usage)

    async def _send(self, tenant: str) -> None:
        batches = self._closed[tenant]
        while batches:
            ordinal, batch = batches[0]
            entries = [word for row, usage in batch.items() for word in (row.encode(), *_numbers(usage))]
            state = state_key(tenant).encode()
            await self._runner.call(Script.BOOK, (state,), self._replica, b"%d" % ordinal, *entries)
            batches.popleft()
        del self._closed[tenant]


def months_of(first: date, last: date) -> list[date]:
    """The first days of the months of these days, the last one first."""
    months = [last.replace(day=1)]
    while months[-1] > first:
        months.append((months[-1] - timedelta(days=1)).replace(day=1))
    return months


@lru_cache(4096)
def kind_of(name: bytes) -> tuple[UsageRow, bool]:
    """The row that a name in the ledger is of, and whether its use was in batches."""
    return row_of(name.removesuffix(IN_BATCHES).decode(errors="replace")), name.endswith(IN_BATCHES)


def usage_of(counts: Iterable[int], in_batches: bool) -> Usage:
    """The usage of an entry by its counts, in the order of lua/ledger.lua."""
    requests, input_tokens, cached, output, kv, engine, reasoning = counts
    of_batches = (input_tokens, output, cached, reasoning) if in_batches else (0, 0, 0, 0)
    batch_input, batch_output, batch_cached, batch_reasoning = of_batches
    return Usage(
        input_tokens,
        output,
        cached,
        kv,
        requests,
        engine / 1e6,
        reasoning,
        batch_input,
        batch_output,
        batch_cached,
        batch_reasoning,
    )


def _name(tenant: str, month: date) -> bytes:
    return b"%b%b%d" % (state_key(tenant).encode(), LEDGERS, (month - EPOCH).days)


def _read(tenant: str, month: date, cursor: bytes) -> bytes:
    return command(b"HSCAN", _name(tenant, month), cursor, b"COUNT", FIELDS_PER_SCAN)


def _rows(ledger: Ledger, answer: Any, link: int = 0) -> LedgerRows:
    """What an answer tells of a ledger."""
    if isinstance(answer, ResponseError):
        tell(_name(*ledger), str(answer))
        return LedgerRows(*ledger, [], is_damaged=True)
    cursor, words = answer
    return LedgerRows(*ledger, words, cursor, link)


def _seconds(name: bytes, times: Any) -> float | None:
    """The sum of the times of a day's replicas; None of a damaged value."""
    try:
        if isinstance(times, ResponseError):
            raise times
        return sum(map(int, times[1::2])) / 1e6
    except DAMAGE as error:
        tell(name, str(error))
        return None


def _running_name(day: date) -> bytes:
    return f"{PREFIX}:running:{(day - EPOCH).days}".encode()


def _add(batch: Open, row: str, usage: Usage) -> None:
    if row not in batch and len(batch) >= MAX_BATCH_ROWS:
        row = rest_name(row)
    batch[row] = batch.get(row, NOTHING) + usage


def _numbers(usage: Usage) -> tuple[bytes, ...]:
    counts = (usage.requests, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    times = round(usage.kv_byte_seconds), round(usage.engine_seconds * 1e6)
    return tuple(b"%d" % count for count in (*counts, *times, usage.reasoning_tokens))
