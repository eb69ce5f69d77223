"""The decisions of the store, in Lua: each is one script, behind the shared parts that it uses."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha1
from pathlib import Path

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from quotas.errors import ConnectionLost, StoreFault, StoreUnavailable, StoreUnsuitable
from quotas.store.redis_client import RedisClient
from quotas.store.redis_link import RedisLink, command

CommandObserver = Callable[[str, float, float, Exception | None], object]
"""Called for each command sent to the store with its name, its begin and end in seconds of `time.monotonic`, and its
error.

The call is made where the command was awaited, in the context of its caller.
"""

LUA = Path(__file__).parent / "lua"


class Script(StrEnum):
    RESERVE = "reserve"
    EXTEND = "extend"
    SETTLE = "settle"
    STATES = "states"
    HEARTBEAT = "heartbeat"
    RECLAIM = "reclaim"
    RESTORE = "restore"
    SUPERSEDE = "supersede"
    CONCLUDE = "conclude"
    BOOK = "book"
    LEASE_KV = "lease_kv"
    SLICE = "slice"
    CHARGE = "charge"
    EXCHANGE = "exchange"
    ANNOUNCE = "announce"
    STORE_RESPONSE = "store_response"
    READ_RESPONSE = "read_response"
    DELETE_RESPONSE = "delete_response"
    OPEN_RESPONSE = "open_response"
    PUT_FILE = "put_file"
    DELETE_FILE = "delete_file"
    OPEN_BATCH = "open_batch"
    CLAIM_BATCH = "claim_batch"
    UPDATE_BATCH = "update_batch"
    FINISH_LINE = "finish_line"
    CLAIM_ALERT = "claim_alert"


ACCOUNT = ("clock", "life", "level", "spec", "record", "account")
SETTLEMENT = ("clock", "level", "spec", "record", "settlement", "ledger")
PARTS = {
    Script.RESERVE: ACCOUNT,
    Script.EXTEND: ACCOUNT,
    Script.STATES: ACCOUNT,
    Script.RESTORE: (*ACCOUNT, "settlement", "ledger"),
    Script.SETTLE: SETTLEMENT,
    Script.HEARTBEAT: ("life", *SETTLEMENT),
    Script.SUPERSEDE: SETTLEMENT,
    Script.CONCLUDE: (*SETTLEMENT, "once"),
    Script.RECLAIM: (*SETTLEMENT, "forfeit"),
    Script.BOOK: ("clock", "level", "ledger"),
    Script.LEASE_KV: ("clock", "life"),
    Script.SLICE: ACCOUNT,
    Script.CHARGE: (*ACCOUNT, "ledger"),
    Script.EXCHANGE: ("clock",),
    Script.ANNOUNCE: ("clock", "life"),
    Script.STORE_RESPONSE: ("clock", "responses"),
    Script.READ_RESPONSE: ("clock",),
    Script.DELETE_RESPONSE: ("responses", "once"),
    Script.OPEN_RESPONSE: ("clock", "life"),
    Script.PUT_FILE: ("clock",),
    Script.DELETE_FILE: (),
    Script.OPEN_BATCH: ("clock",),
    Script.CLAIM_BATCH: ("clock",),
    Script.UPDATE_BATCH: ("clock",),
    Script.FINISH_LINE: (*ACCOUNT, "ledger"),
    Script.CLAIM_ALERT: ("clock",),
}


@dataclass(frozen=True, slots=True)
class Source:
    text: bytes
    digest: bytes  # for EVALSHA


def load_scripts(parts: Mapping[str, str] | None = None) -> dict[Script, Source]:
    """Return every script. `parts` replace the parts of the same name, as a test does with the clock."""
    return {script: _source((*names, script.value), parts or {}) for script, names in PARTS.items()}


def _source(names: tuple[str, ...], parts: Mapping[str, str]) -> Source:
    text = "\n".join(parts.get(name) or (LUA / f"{name}.lua").read_text() for name in names).encode()
    return Source(text, sha1(text, usedforsecurity=False).hexdigest().encode())


OLDEST_VERSION = (6, 2)


async def check_server(link: RedisLink) -> None:
    """Raise `StoreUnsuitable` with the remedy, or `StoreUnavailable` if the server replicates another."""
    answers = [link.submit(command(b"INFO", section)) for section in (b"server", b"memory", b"replication")]
    try:
        info = _parse(b"\n".join([await answer for answer in answers]))
    except NoPermissionError as error:
        raise StoreUnsuitable(f"the user of the quota store needs the permission +info: {error}") from error
    version = info.get("redis_version", "0.0")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_VERSION:
        raise StoreUnsuitable(f"the quota store is Redis {version}: it must be 6.2 or later, or Valkey")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        raise StoreUnsuitable(
            f"the quota store may evict tenants' spending: its maxmemory-policy is {policy}; "
            f"set it to noeviction, or use a server that is no cache"
        )
    if info.get("role") == "slave":
        raise StoreUnavailable("the quota store's address leads to a replica, which cannot be written to")


def _parse(text: bytes) -> dict[str, str]:
    lines = text.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _failure(script: Script, error: ResponseError) -> StoreFault:
    return StoreFault(f"the quota store answered {script} with an error: {error}")


class ScriptRunner:
    """Runs scripts on the server, loading missing ones."""

    def __init__(self, url: str, timeout: float, scripts: Mapping[Script, Source] | None = None) -> None:
        """`url` and `timeout` are those of `RedisClient`."""
        self.on_command: list[CommandObserver] = []
        self.scripts = scripts or load_scripts()
        self.client = RedisClient(url, timeout, self._prepare)

    async def call(self, script: Script, keys: tuple[bytes, ...], *arguments: bytes) -> list[bytes]:
        """Run a script. Returns its status, then the rest of its answer."""
        return await self.run(script, self._packed(script, keys, *arguments))

    async def run(self, script: Script, packed: bytes) -> list[bytes]:
        """Send an EVALSHA of an idempotent `script`: it is repeated when the connection is lost."""
        try:
            return await self.run_once(script, packed)
        except ConnectionLost:
            return await self.run_once(script, packed)

    async def run_once(self, script: Script, packed: bytes) -> list[bytes]:
        """Send it without a retry on a new connection: `ConnectionLost` leaves open whether it ran."""
        began, failure = time.monotonic(), None
        try:
            return await self._answered(script, packed)
        except Exception as error:
            failure = error
            raise
        finally:
            self._observe(script, began, failure)

    def _observe(self, script: Script, began: float, failure: Exception | None) -> None:
        ended = time.monotonic()
        for observe in self.on_command:
            observe(script, began, ended, failure)

    def submit(self, script: Script, packed: bytes, answered: Callable[[list[bytes] | Exception], object]) -> bool:
        """Send it as `run_once` does, without a task that waits.

        `answered` is called in the context of the caller with the answer, or with the error that `run_once` would
        raise. `NoScriptError` alone is left to the caller, who runs it. Returns whether there is a connection to send
        it on.
        """
        began = time.monotonic()

        def done(answer: list[bytes] | Exception) -> None:
            if not isinstance(answer, NoScriptError):
                answer = _failure(script, answer) if isinstance(answer, ResponseError) else answer
                self._observe(script, began, answer if isinstance(answer, Exception) else None)
            answered(answer)

        return self.client.submit(packed, done)

    def _packed(self, script: Script, keys: tuple[bytes, ...], *arguments: bytes) -> bytes:
        return command(b"EVALSHA", self.scripts[script].digest, b"%d" % len(keys), *keys, *arguments)

    async def _answered(self, script: Script, packed: bytes) -> list[bytes]:
        try:
            try:
                answer: list[bytes] = await self.client.send(packed)
            except NoScriptError:
                await self.client.execute(b"SCRIPT", b"LOAD", self.scripts[script].text)
                answer = await self.client.send(packed)
        except ResponseError as error:
            raise _failure(script, error) from error
        return answer

    async def _prepare(self, link: RedisLink) -> None:
        await check_server(link)
        loads = [link.submit(command(b"SCRIPT", b"LOAD", source.text)) for source in self.scripts.values()]
        await asyncio.gather(*loads)
