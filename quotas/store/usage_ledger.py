"""The ledger: the usage of tenants by UTC day and row. A row is of an API key, a model and a class, and of a user and
tags as far as the tenant's policy asks. Beside it: for how long replicas have run, by UTC day.
"""

import asyncio
import re
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import date, timedelta
from typing import NamedTuple
from urllib.parse import unquote

from redis.exceptions import NoPermissionError

from quotas.errors import StoreUnsuitable
from quotas.policy.limit import EPOCH
from quotas.reservation import NOTHING, Usage
from quotas.store.account import PREFIX, state_key
from quotas.store.redis_link import command
from quotas.store.replica import all_of
from quotas.store.replica_name import ReplicaName
from quotas.store.scripts import Script, ScriptRunner
from quotas.usage_row import UsageRow, rest_name, row_of

ENTRY = struct.Struct("<7d")  # of lua/ledger.lua; of an older version, without the last
LEDGERS = b":usage:"
PATTERN = f"{PREFIX}:{{*}}".encode() + LEDGERS
STATE = rb"%b:\{([!-z|~]{1,192})\}" % PREFIX.encode()  # of a tenant
LEDGER = re.compile(STATE + LEDGERS + rb"([0-9]{1,6})")
IN_BATCHES = b"/batch"  # ends the name of a row of use in batches (lua/finish_line.lua); no part of a name has a slash
KEYS_PER_SCAN = b"1000"  # scanned at once, so that other calls do not wait
WORDS_PER_TURN = 400  # of answers, which are read on the event loop in a millisecond
TENANTS_PER_TURN = 500  # whose batches are closed in some milliseconds, so that other tasks do not wait
MAX_BATCH_ROWS = 1000  # of a tenant, while the store is away or until the next flush; further ones are summed up
LEDGER_LIFE_SECONDS = b"%d" % (400 * 86400)

Ledger = tuple[str, date]
"""The tenant and the UTC day of a ledger."""

Batch = dict[UsageRow, Usage]
"""The usage of one tenant by row."""

Open = dict[str, Usage]
"""The usage of one tenant by the name of its row, to be booked."""


class TenantLedgers(NamedTuple):
    """A tenant's ledgers of some days: the names of their rows, and the entries as lua/read_usage.lua joins them."""

    tenant: str
    names: list[bytes]
    entries: bytes


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

    async def of(self, ledgers: Iterable[Ledger]) -> list[Batch]:
        """The usage in each of these ledgers, by row."""
        names = (f"{state_key(tenant)}:usage:{(day - EPOCH).days}".encode() for tenant, day in ledgers)
        answers = await self._runner.client.send_all(command(b"HGETALL", name) for name in names)
        if sum(map(len, answers)) > WORDS_PER_TURN:
            return await asyncio.to_thread(_batches, answers)
        return _batches(answers)

    async def over_days(self, tenants: Sequence[str], first: date, last: date) -> list[TenantLedgers]:
        """What each of these tenants has used on these days; one with long ledgers is there several times."""
        found, end = list[TenantLedgers](), (last - EPOCH).days
        begins = [(tenant, (first - EPOCH).days) for tenant in tenants]
        while begins:
            calls = ((state_key(tenant).encode(), b"%d" % begin, b"%d" % end) for tenant, begin in begins)
            answers = await self._runner.call_all(Script.READ_USAGE, calls)
            told = [(tenant, answer) for (tenant, _), answer in zip(begins, answers, strict=True)]
            found += [TenantLedgers(tenant, names, entries) for tenant, (*names, _, entries) in told]
            begins = [(tenant, int(answer[-2])) for tenant, answer in told if int(answer[-2]) <= end]
        return found

    async def tenant_days(self, first: date = date.min, last: date = date.max) -> list[Ledger]:
        """The tenants and UTC days of this period with a ledger, in no order.

        It reads the names of all keys of the database. Raises `StoreUnavailable`, and `StoreUnsuitable` if that is not
        permitted.
        """
        found: set[Ledger] = set()
        async for names in self._names(first, last):
            found.update(ledger for ledger in _named(names) if first <= ledger[1] <= last)
        return list(found)

    async def tenants(self, first: date, last: date) -> tuple[list[str], int]:
        """The tenants with a ledger on these days, in order, and how many ledgers. Raises as `tenant_days` does."""
        found, num_ledgers = dict[bytes, str](), 0  # names of tenants, read as they come: 10,000 at once take 15 ms
        days = range((first - EPOCH).days, (last - EPOCH).days + 1)
        async for names in self._names(first, last):
            for name in names:
                state, _, day = name.rpartition(LEDGERS)
                if day.isdigit() and int(day) in days:
                    num_ledgers += 1
                    if state not in found and (match := re.fullmatch(STATE, state)):
                        found[state] = unquote(match[1].decode())
        return await asyncio.to_thread(sorted, found.values()), num_ledgers

    async def _names(self, first: date, last: date) -> AsyncIterator[list[bytes]]:
        """Yield the names of ledgers, those of these days and perhaps others."""
        pattern = PATTERN + (b"%d" % (first - EPOCH).days if first == last else b"*")
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
        scan = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", KEYS_PER_SCAN)
        return asyncio.create_task(self._runner.client.execute(*scan))

    async def book_running(self, day: date, seconds: float) -> None:
        """Book for how long this process has run on a UTC day, in all. Raises `StoreUnavailable`."""
        name = _running_name(day)
        await self._runner.client.execute(b"HSET", name, self._process, b"%d" % round(seconds * 1e6))
        await self._runner.client.execute(b"EXPIRE", name, LEDGER_LIFE_SECONDS)

    async def running(self, days: Iterable[date]) -> list[float]:
        """The seconds for which all replicas together have run, on each of these UTC days. Raises
        `StoreUnavailable`.
        """
        answers = await self._runner.client.send_all(command(b"HGETALL", _running_name(day)) for day in days)
        return [sum(map(int, times[1::2])) / 1e6 for times in answers]

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


def kind_of(name: bytes) -> tuple[UsageRow, bool]:
    """The row that a name in the ledger is of, and whether its use was in batches."""
    return row_of(name.removesuffix(IN_BATCHES).decode()), name.endswith(IN_BATCHES)


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


def _batches(answers: Iterable[list[bytes]]) -> list[Batch]:
    return [_usage_by_row(words) for words in answers]


def _named(names: list[bytes]) -> Iterator[Ledger]:
    for name in names:
        if match := LEDGER.fullmatch(name):
            yield unquote(match[1].decode()), EPOCH + timedelta(days=int(match[2]))


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


def _usage_by_row(words: list[bytes]) -> Batch:
    found: Batch = {}
    for name, text in zip(words[::2], words[1::2], strict=True):
        row, in_batches = kind_of(name)
        counts = map(int, ENTRY.unpack(text.ljust(ENTRY.size, b"\0")))
        found[row] = found.get(row, NOTHING) + usage_of(counts, in_batches)
    return found
