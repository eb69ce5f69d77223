"""What `sluice doctor --live` would say of this gateway, said by itself."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.doctor.finding import Finding
from gateway.doctor.findings import findings
from gateway.doctor.snapshot import SECONDS, Snapshot

STALE = 60.0  # seconds, after which a snapshot is too old to compare with

Json = dict[str, Any]


class Diagnosis:
    """Compares two snapshots, `SECONDS` apart or more. The later one is kept: for the next time, and its findings for
    those who ask within `SECONDS` of it.

    `read` gives the answers of the admin API by the names that the doctor asks for, `metrics` those in Prometheus'
    text format, `clock` seconds.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Mapping[str, Json]]],
        metrics: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._read = read
        self._metrics = metrics
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: Snapshot | None = None
        self._found: list[Finding] = []

    async def report(self) -> Json:
        """At once where it was asked for in the last minute, else after `SECONDS`."""
        async with self._lock:
            if self._last is None or self._clock() - self._last.at >= SECONDS:
                await self._look()
        return {"findings": [finding.to_json() for finding in self._found]}

    async def _look(self) -> None:
        before, after = await self._before(), await self._snapshot()
        self._found = await asyncio.to_thread(findings, before, after)
        self._last = after

    async def _before(self) -> Snapshot:
        """The last one, else one of `SECONDS` ago."""
        if self._last is not None and self._clock() - self._last.at <= STALE:
            return self._last
        first = await self._snapshot()
        await asyncio.sleep(SECONDS)
        return first

    async def _snapshot(self) -> Snapshot:
        at, answers, text = self._clock(), await self._read(), self._metrics().decode()
        return await asyncio.to_thread(Snapshot.of, at, text, answers)
