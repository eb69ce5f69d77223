"""The ledger: the usage of tenants, by API key and UTC day."""

import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from urllib.parse import unquote

from redis.exceptions import NoPermissionError

from quotas.errors import StoreUnsuitable
from quotas.policy.limit import EPOCH
from quotas.reservation import NOTHING, Usage
from quotas.store.account import NO_KEY, PREFIX, key_name, state_key
from quotas.store.redis_link import command
from quotas.store.replica import all_of
from quotas.store.replica_name import ReplicaName
from quotas.store.scripts import Script, ScriptRunner

ENTRY = struct.Struct("<5d")  # of lua/ledger.lua
PATTERN = f"{PREFIX}:{{*}}:usage:*".encode()
LEDGER = re.compile(rb"%b:\{([!-z|~]{1,192})\}:usage:([0-9]{1,6})" % PREFIX.encode())
IN_BATCHES = b"/batch"  # ends the field of a key's use in batches (lua/finish_line.lua); no name of a key has a slash
KEYS_PER_SCAN = b"200"  # scanned at once, so that other calls do not wait

Ledger = tuple[str, date]
"""The tenant and the UTC day of a ledger."""

Batch = dict[str | None, Usage]
"""The usage of one tenant by API key."""


class UsageLedger:
    """The usage that no limit counts, collected and booked in batches, each once even if sent repeatedly.

    There is one per process. Usage that limits count is booked as it is settled.
    """

    def __init__(self, runner: ScriptRunner, name: ReplicaName) -> None:
        self._runner = runner
        self._replica = name.id.encode()
        self._ordinal = name.first_ordinal
        self._open: dict[str, Batch] = {}  # by tenant
        self._closed: dict[str, deque[tuple[int, Batch]]] = {}  # by tenant, in order: sent, or next

    def add(self, tenant: str, key: str | None, usage: Usage) -> None:
        """Add usage, to be booked by the next `flush`."""
        batch = self._open.setdefault(tenant, {})
        batch[key] = batch.get(key, NOTHING) + usage

    async def flush(self) -> None:
        """Book the added usage. Raises `StoreUnavailable`; unbooked usage is kept for the next call."""
        for tenant, batch in self._open.items():
            self._close(tenant, batch)
        self._open = {}
        await all_of(map(self._send, list(self._closed)))

    async def of(self, ledgers: Iterable[Ledger]) -> list[Batch]:
        """The usage in each of these ledgers, by key; None stands for requests without a key."""
        names = (f"{state_key(tenant)}:usage:{(day - EPOCH).days}".encode() for tenant, day in ledgers)
        answers = await self._runner.client.send_all(command(b"HGETALL", name) for name in names)
        return [_usage_by_key(zip(words[::2], words[1::2], strict=True)) for words in answers]

    async def ledgers(self, first: date = date.min, last: date = date.max) -> list[Ledger]:
        """The tenants and UTC days of this period with a ledger, in no order.

        It reads the names of all keys of the database. Raises `StoreUnavailable`, and `StoreUnsuitable` if that is not
        permitted.
        """
        found: set[Ledger] = set()
        cursor = b"0"
        while True:
            try:
                scan = (b"SCAN", cursor, b"MATCH", PATTERN, b"COUNT", KEYS_PER_SCAN)
                cursor, names = await self._runner.client.execute(*scan)
            except NoPermissionError as error:
                raise StoreUnsuitable(
                    f"to find all tenants, the store's user needs the permission +scan: {error}"
                ) from error
            found.update(ledger for ledger in _named(names) if first <= ledger[1] <= last)
            if cursor == b"0":
                return list(found)

    def _close(self, tenant: str, batch: Batch) -> None:
        """Queue a batch. The first queued one may have been sent, and stays as it is; later usage joins the last while
        the store is away.
        """
        batches = self._closed.setdefault(tenant, deque())
        if len(batches) < 2:
            self._ordinal += 1
            batches.append((self._ordinal, {}))
        _, last = batches[-1]
        for key, usage in batch.items():
            last[key] = last.get(key, NOTHING) + usage

    async def _send(self, tenant: str) -> None:
        batches = self._closed[tenant]
        while batches:
            ordinal, batch = batches[0]
            entries = [word for key, usage in batch.items() for word in (key_name(key).encode(), *_numbers(usage))]
            state = state_key(tenant).encode()
            await self._runner.call(Script.BOOK, (state,), self._replica, b"%d" % ordinal, *entries)
            batches.popleft()
        del self._closed[tenant]


def _named(names: list[bytes]) -> Iterator[Ledger]:
    for name in names:
        if match := LEDGER.fullmatch(name):
            yield unquote(match[1].decode()), EPOCH + timedelta(days=int(match[2]))


def _numbers(usage: Usage) -> tuple[bytes, ...]:
    counts = (usage.requests, usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    return tuple(b"%d" % count for count in (*counts, round(usage.kv_byte_seconds)))


def _usage_by_key(entries: Iterable[tuple[bytes, bytes]]) -> Batch:
    found: Batch = {}
    for field, text in entries:
        requests, input_tokens, cached, output, kv = map(int, ENTRY.unpack(text))
        name, is_batch = field.removesuffix(IN_BATCHES), field.endswith(IN_BATCHES)
        key = None if name == NO_KEY.encode() else unquote(name)
        of_batch = (input_tokens, output, cached) if is_batch else ()
        found[key] = found.get(key, NOTHING) + Usage(input_tokens, output, cached, kv, requests, *of_batch)
    return found
