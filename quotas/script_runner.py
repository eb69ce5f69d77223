"""Scripts on a server that may have forgotten them, or may break the connection once."""

import asyncio
import time
from collections.abc import Mapping
from typing import cast

from redis.exceptions import NoScriptError, ResponseError

from quotas.errors import ConnectionLost, StoreFault
from quotas.redis_client import RedisClient
from quotas.redis_link import RedisLink
from quotas.resp import command
from quotas.scripts import Script, Source, load_scripts
from quotas.store import Observer
from quotas.store_check import check_server


class ScriptRunner:
    def __init__(self, url: str, timeout: float, scripts: Mapping[Script, Source] | None = None) -> None:
        """`url` and `timeout` as in `RedisClient`."""
        self.on_command: list[Observer] = []
        self.scripts = scripts or load_scripts()
        self.client = RedisClient(url, timeout, self._prepare)

    async def call(self, script: Script, keys: tuple[bytes, ...], *arguments: bytes) -> list[bytes]:
        """The answer of a script: its status, then what it says."""
        return await self.run(script, self._packed(script, keys, *arguments))

    async def run(self, script: Script, packed: bytes) -> list[bytes]:
        """`packed` is an EVALSHA of `script`, which may run twice."""
        try:
            return await self._executed(script, packed)
        except ConnectionLost:
            return await self._executed(script, packed)

    async def run_once(self, script: Script, packed: bytes) -> list[bytes]:
        """The same without a second try on a new connection: `ConnectionLost` leaves open whether it was executed."""
        return await self._executed(script, packed)

    def _packed(self, script: Script, keys: tuple[bytes, ...], *arguments: bytes) -> bytes:
        return command(b"EVALSHA", self.scripts[script].digest, b"%d" % len(keys), *keys, *arguments)

    async def _executed(self, script: Script, packed: bytes) -> list[bytes]:
        """Observed, whether it succeeds or fails."""
        began, failure = time.monotonic(), None
        try:
            return await self._answered(script, packed)
        except Exception as error:
            failure = error
            raise
        finally:
            ended = time.monotonic()
            for tell in self.on_command:
                tell(script, began, ended, failure)

    async def _answered(self, script: Script, packed: bytes) -> list[bytes]:
        try:
            try:
                answer = await self.client.send(packed)
            except NoScriptError:
                await self.client.execute(b"SCRIPT", b"LOAD", self.scripts[script].text)
                answer = await self.client.send(packed)
        except ResponseError as error:
            raise StoreFault(f"the quota store failed to {script}: {error}") from error
        return cast(list[bytes], answer)

    async def _prepare(self, link: RedisLink) -> None:
        await check_server(link)
        loads = [link.submit(command(b"SCRIPT", b"LOAD", source.text)) for source in self.scripts.values()]
        await asyncio.gather(*loads)
