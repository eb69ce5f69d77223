"""Announcements of a fleet's replicas in the store, each valid for a time and renewed by its replica.

Of a fleet there is one key, `sluice:replicas:{name}`: `since`, when its first replica announced itself, and of each
replica until when that counts, by the store's clock, and what it says. It expires with the last of them.
"""

from typing import NamedTuple
from urllib.parse import quote

from quotas.store.scripts import Script, ScriptRunner

LIFE_SECONDS = 5.0  # for which an announcement counts


class Announced(NamedTuple):
    """What replicas say that are there now, the newest last; `since` is another one after the store has lost the list,
    and empty where there is none.
    """

    since: str
    said: list[bytes]


class Announcements:
    """The announcements of one fleet. Every call raises `StoreUnavailable` or `StoreFault` if it cannot be done."""

    def __init__(self, runner: ScriptRunner, fleet: str) -> None:
        self._key = f"sluice:replicas:{{{quote(fleet, safe='')}}}".encode()
        self._runner = runner

    async def announce(self, replica: str, said: bytes, life: float = LIFE_SECONDS) -> Announced:
        """Replace the replica's announcement by `said`, which counts for `life` seconds."""
        return await self._ask(replica, round(life * 1e6), said)

    async def leave(self, replica: str) -> Announced:
        """Have what a replica said count no more."""
        return await self._ask(replica, 0, b"")

    async def read(self) -> Announced:
        """Return what all say."""
        return await self._ask("", 0, b"")

    async def _ask(self, replica: str, life: int, said: bytes) -> Announced:
        answer = await self._runner.call(Script.ANNOUNCE, (self._key,), replica.encode(), b"%d" % life, said)
        return Announced(answer[0].decode(), answer[1:])
