"""What `sluice doctor --live` would say of this gateway, said by itself."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.doctor.findings import findings
from gateway.doctor.snapshot import SECONDS, Snapshot

STALE = 60.0  # seconds, after which a snapshot is too old to compare with

Json = dict[str, Any]


class Diagnosis:
    """Compares two snapshots, `SECONDS` apart or more; the later one is kept for the next time.

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

    async def report(self) -> Json:
        """At once where it was asked for in the last minute, else after `SECONDS`."""
        async with self._lock:
            before = await self._before()
            await asyncio.sleep(max(0.0, SECONDS - (self._clock() - before.at)))
            after = self._last = await self._snapshot()
            found = await asyncio.to_thread(findings, before, after)
        return {"findings": [finding.to_json() for finding in found]}

    async def _before(self) -> Snapshot:
        last = self._last
        return last if last is not None and self._clock() - last.at <= STALE else await self._snapshot()

    async def _snapshot(self) -> Snapshot:
        at, answers, text = self._clock(), await self._read(), self._metrics().decode()
        return await asyncio.to_thread(Snapshot.of, at, text, answers)
