"""Announcements of a fleet's replicas in the store, each valid for a time and renewed by its replica.

A fleet has one key, `sluice:replicas:{name}`: `since`, the moment of its first announcement, and of each replica the
expiry, by the store's clock, and the announcement. It expires with the last of them.
"""

from typing import NamedTuple
from urllib.parse import quote

from quotas.store.scripts import Script, ScriptRunner

LIFE_SECONDS = 5.0  # for which an announcement counts


class Announced(NamedTuple):
    """The present announcements, newest last; `since` changes when the store loses the list, and is empty without
    one.
    """

    since: str
    said: list[bytes]


class Announcements:
    """The announcements of one fleet. Every call raises `StoreUnavailable` or `StoreFault` if it cannot be done."""

    def __init__(self, runner: ScriptRunner, fleet: str) -> None:
        self._key = f"sluice:replicas:{{{quote(fleet, safe='')}}}".encode()
        self._runner = runner

    async def announce(self, replica: str, said: bytes, life: float = LIFE_SECONDS) -> Announced:
        """Replace the replica's announcement by `said`, valid for `life` seconds."""
        return await self._ask(replica, round(life * 1e6), said)

    async def leave(self, replica: str) -> Announced:
        """Withdraw a replica's announcement."""
        return await self._ask(replica, 0, b"")

    async def read(self) -> Announced:
        return await self._ask("", 0, b"")

    async def _ask(self, replica: str, life: int, said: bytes) -> Announced:
        answer = await self._runner.call(Script.ANNOUNCE, (self._key,), replica.encode(), b"%d" % life, said)
        return Announced(answer[0].decode(), answer[1:])
