"""Files and batches: their records, the done lines of batches, and the leases under which replicas compute them.

A tenant has `sluice:{tenant}:files` and `:files:order` (lua/put_file.lua), `:batches`, its batches by the time of their
making, and `:batches:open`, its open ones (lua/open_batch.lua). A batch is a hash, `:batch:<id>`: what its
client sent, sealed; its status, times and counts; `lease` and `epoch`, by which one replica at a time has it
(lua/claim_batch.lua). Beside it, `:batch:<id>:lines` has the done lines by number (lua/finish_line.lua). The sorted set
`sluice:batches` has the open batches of all tenants by when their lease ends, so that a replica finds those that nobody
has by one read: it may be behind the batches, which decide. Another tenant's id is answered as an unknown one.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import NamedTuple
from urllib.parse import quote, unquote

from redis.exceptions import ResponseError

from quotas.damage import tell
from quotas.errors import QuotaError, StoreFault
from quotas.policy.limit import TokenPrices
from quotas.store.account import PREFIX, state_key
from quotas.store.redis_link import command
from quotas.store.scripts import Script, ScriptRunner

_INDEX = f"{PREFIX}:batches".encode()
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
SCANNED = 500  # lines or files asked for at once
LEAST_FILE_BYTES = 4096  # that a file counts as: without, a tenant's bytes would be millions of records in the store
MAX_KEPT_BATCHES = 1000  # of a tenant; then the oldest that have ended make room
Fields = dict[str, str]


class DoneLine(NamedTuple):
    """The epoch in which a line was done, which names the file of its result; and whether it succeeded."""

    epoch: int
    is_completed: bool


class FinishedLine(NamedTuple):
    """A line whose result is on disk, as the holder of the batch's lease reports it."""

    batch: str
    epoch: int
    number: int
    is_completed: bool
    row: str | None = None  # of the ledger, in which its use is booked
    result_bytes: int = 0
    prices: TokenPrices | None = None  # of tokens in batches


class BatchStore:
    """The records of all tenants. Every call may raise `StoreUnavailable` or `StoreFault`."""

    def __init__(self, runner: ScriptRunner, lease: float) -> None:
        """`lease` is in seconds."""
        self.lease = lease
        self._runner = runner

    # files

    async def put_file(self, tenant: str, name: str, size: int, expires: float, record: str, most: int) -> bool:
        """Keep a file's record until `expires` (Unix seconds). Returns False if the bytes of all of the tenant's files
        would be more than `most`.
        """
        words = (name, max(size, LEAST_FILE_BYTES), round(expires * 1e6), record, most)
        return await self._ask(Script.PUT_FILE, self._file_keys(tenant), *words) == "ok"

    async def put_results(
        self, tenant: str, name: str, size: int, expires: float, record: str, batch: str, epoch: int
    ) -> bool:
        """Keep the record of a file of results, whose bytes count already. Returns False if the lease is lost."""
        words = (name, max(size, LEAST_FILE_BYTES), round(expires * 1e6), record, 2**53, epoch)
        keys = (*self._file_keys(tenant), self._batch_key(tenant, batch))
        return await self._ask(Script.PUT_FILE, keys, *words) == "ok"

    async def file(self, tenant: str, name: str) -> str | None:
        """The record of a file."""
        said = await self._execute(b"HGET", self._file_keys(tenant)[0], name or "-")
        return None if said is None else _record(said)

    async def files(self, tenant: str, after: str | None, most: int) -> list[tuple[str, str]]:
        """Files behind the one named `after`, the newest first: the name and the record of each."""
        key, order = self._file_keys(tenant)
        names = await self._page(order, after, most)
        said = await self._execute(b"HMGET", key, *names) if names else []
        found = zip(names, said, strict=True)
        return [(name, _record(one)) for name, one in found if one is not None]

    async def expiries(self, tenant: str) -> dict[str, float]:
        """When each of the tenant's files expires, in Unix seconds; a damaged one never."""
        said = self._scanned(self._file_keys(tenant)[0])
        return {name.decode(errors="replace"): _expiry(one) async for name, one in said if name}

    async def delete_file(self, tenant: str, name: str) -> bool:
        return await self._ask(Script.DELETE_FILE, self._file_keys(tenant), name) == "ok"

    async def file_bytes(self, tenant: str) -> int:
        """The bytes of all of the tenant's files, and of the results of its open batches."""
        key = self._file_keys(tenant)[0]
        said = await self._execute(b"HGET", key, "") or b"0"
        try:
            return int(said)
        except ValueError as error:
            raise StoreFault(f"the bytes of {key.decode()} are damaged: {error}") from error

    # batches

    async def open(self, tenant: str, name: str, fields: Mapping[str, str], most: int) -> bool:
        """Open a batch. Returns False if the tenant has `most` open ones."""
        await self._execute(b"ZADD", _INDEX, 0, _entry(tenant, name))
        words = [word for field in fields.items() for word in field]
        keys = (self._batch_key(tenant, name), self._of(tenant, "batches"), self._of(tenant, "batches:open"))
        is_open = await self._ask(Script.OPEN_BATCH, keys, name, most, MAX_KEPT_BATCHES, *words) == "ok"
        if not is_open:
            await self.forget(tenant, name)
        return is_open

    async def batch(self, tenant: str, name: str) -> Fields | None:
        """Raises `StoreFault` for a damaged batch, too."""
        return _fields(name, await self._execute(b"HGETALL", self._batch_key(tenant, name)))

    async def read(self, tenant: str, names: Sequence[str]) -> list[tuple[str, Fields | None]]:
        """These batches: None of one that is gone, no fields of a damaged one, which is told. A store that may not be
        read is a `StoreFault`, and no damage.
        """
        asked = [command(b"HGETALL", self._batch_key(tenant, name)) for name in names]
        answers, found = await self._runner.client.send_all(asked), list[tuple[str, Fields | None]]()
        for name, said in zip(names, answers, strict=True):
            try:
                found.append((name, _fields(name, said)))
            except StoreFault as error:
                tell(self._batch_key(tenant, name), str(error))
                found.append((name, {}))
        return found

    async def batches(self, tenant: str, after: str | None, most: int) -> list[tuple[str, Fields | None]]:
        """Batches behind the one named `after`, the newest first, as `read` tells them."""
        order = self._of(tenant, "batches")
        found = await self.read(tenant, await self._page(order, after, most))
        if gone := [name for name, one in found[:-1] if one is None]:  # the next page begins behind the last
            await self._execute(b"ZREM", order, *gone)
        return found

    async def open_batches(self) -> list[tuple[str, str]]:
        """The tenant and the id of every batch that has not ended, and perhaps of some that have."""
        return [_opened(one) for one in await self._execute(b"ZRANGE", _INDEX, 0, -1)]

    async def unclaimed(self) -> list[tuple[str, str]]:
        """Those whose lease has run out, as far as the index knows."""
        return [_opened(one) for one in await self._execute(b"ZRANGEBYSCORE", _INDEX, b"-inf", time.time())]

    async def forget(self, tenant: str, name: str) -> None:
        """Take a batch that is not open out of the index."""
        with suppress(QuotaError):  # a replica that finds it closed tries again
            await self._execute(b"ZREM", _INDEX, _entry(tenant, name))

    async def _noted(self, tenant: str, name: str, lease: float) -> None:
        """Note in the index the seconds for which no replica has to look for a batch."""
        with suppress(QuotaError):  # others look for it in vain until it is noted
            await self._execute(b"ZADD", _INDEX, b"XX", time.time() + lease, _entry(tenant, name))

    async def open_of(self, tenant: str) -> list[str]:
        """The ids of the tenant's batches that have not ended."""
        return sorted([one.decode() for one in await self._execute(b"SMEMBERS", self._of(tenant, "batches:open"))])

    async def claim(self, tenant: str, name: str) -> int:
        """Take the lease of a batch. Returns its epoch; 0 while another replica has it."""
        keys = (self._batch_key(tenant, name),)
        epoch = int(await self._ask(Script.CLAIM_BATCH, keys, round(self.lease * 1e6)))
        if epoch:
            await self._noted(tenant, name, self.lease)
        return epoch

    async def update(
        self,
        tenant: str,
        name: str,
        fields: Mapping[str, str],
        *,
        epoch: int | None = None,
        statuses: tuple[str, ...] = (),
        kept: float | None = None,
        is_given_back: bool = False,
    ) -> bool:
        """Change fields of a batch, with an `epoch` for the holder of its lease, which is renewed, or given back;
        `kept`: it is closed, and kept for these seconds. Returns False if the lease is lost, or the status is none of
        `statuses`.
        """
        lease = "" if epoch is None else "0" if is_given_back else str(round(self.lease * 1e6))
        words = [word for field in fields.items() for word in field]
        allowed = f",{','.join(statuses)}," if statuses else ""
        life = "" if kept is None else round(kept * 1e6)
        keys = (self._batch_key(tenant, name), self._of(tenant, "batches:open"), self._of(tenant, "files"))
        told = (name, "" if epoch is None else epoch, lease, allowed, life, *words)
        is_done = await self._ask(Script.UPDATE_BATCH, keys, *told) == "ok"
        if is_done and kept is not None:
            await self.forget(tenant, name)
        elif is_done and epoch is not None:
            await self._noted(tenant, name, 0.0 if is_given_back else self.lease)
        return is_done

    async def done_lines(self, tenant: str, name: str) -> dict[int, DoneLine]:
        """The done lines of a batch by number, which counts from 0."""
        done = dict[int, DoneLine]()
        async for line, said in self._scanned(self._batch_key(tenant, name) + b":lines"):
            epoch, how = said.split()
            done[int(line)] = DoneLine(int(epoch), how == b"completed")
        return done

    # inside

    async def _scanned(self, key: bytes) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yield a hash, which is asked for in parts: a large one at once would hold the event loop and the store for a
        tenth of a second. A field that is changed meanwhile may come twice.
        """
        cursor = None
        while cursor != b"0":
            cursor, words = await self._execute(b"HSCAN", key, cursor or b"0", b"COUNT", SCANNED)
            for pair in zip(words[::2], words[1::2], strict=True):
                yield pair

    async def _page(self, order: bytes, after: str | None, most: int) -> list[str]:
        rank = None if after is None else await self._execute(b"ZREVRANK", order, after)
        first = 0 if rank is None else rank + 1
        return [one.decode() for one in await self._execute(b"ZREVRANGE", order, first, first + most - 1)]

    async def _ask(self, script: Script, keys: tuple[bytes, ...], *words: str | int) -> str:
        return (await self._runner.call(script, keys, *[str(one).encode() for one in words]))[0].decode()

    async def _execute(self, *words: str | bytes | float):  # type: ignore[no-untyped-def]  # as the command answers
        return await self._runner.client.execute(*[w if isinstance(w, bytes) else str(w).encode() for w in words])

    @staticmethod
    def _of(tenant: str, what: str) -> bytes:
        return f"{state_key(tenant)}:{what}".encode()

    def _file_keys(self, tenant: str) -> tuple[bytes, bytes]:
        return self._of(tenant, "files"), self._of(tenant, "files:order")

    def _batch_key(self, tenant: str, name: str) -> bytes:
        return self._of(tenant, f"batch:{name}")


def _entry(tenant: str, name: str) -> str:
    return f"{quote(tenant, safe='', errors='surrogatepass')} {name}"


def _fields(name: str, said: "list[bytes] | ResponseError") -> Fields | None:
    """The fields of a batch; None if it is gone. Raises `StoreFault` for a damaged one."""
    if isinstance(said, ResponseError):
        raise StoreFault(f"the batch {name} is damaged: {said}")
    words = [one.decode(errors="replace") for one in said]
    fields = dict(zip(words[::2], words[1::2], strict=True))
    if fields and not {"record", "status"} <= fields.keys():
        raise StoreFault(f"the batch {name} is damaged: it has no record or no status")
    return fields or None


def _record(said: bytes) -> str:
    """The sealed record of a file; empty of a damaged value."""
    return "".join(said.decode(errors="replace").split(" ", 2)[2:])


def _expiry(said: bytes) -> float:
    try:
        return int(said.split(b" ", 2)[1]) / 1e6
    except (ValueError, IndexError):
        return inf


def _opened(entry: bytes) -> tuple[str, str]:
    tenant, _, name = entry.decode(errors="replace").partition(" ")
    return unquote(tenant, errors="surrogatepass"), name
