"""The gateway's diagnosis of itself, with the findings of `sluice doctor --live`."""

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.doctor.causes import ranked
from gateway.doctor.finding import Finding
from gateway.doctor.findings import findings, past_findings, past_window
from gateway.doctor.history import figures
from gateway.doctor.snapshot import HISTORY_SECONDS, METRICS_INTERVAL_SECONDS, WINDOW_SECONDS, Samples, Snapshot

STALE_SNAPSHOT_SECONDS = 60.0  # after which a snapshot is too old to compare with
MAX_METRICS_BYTES = 2**26  # of one set that is compared: 10,000 tenants have a fifth

Json = dict[str, Any]


class Diagnosis:
    """Compares two snapshots of the gateway, `WINDOW_SECONDS` apart or more.

    The later snapshot is kept for the next comparison, and its findings for calls within `WINDOW_SECONDS`. Troubles
    that metrics alone show are looked for in the last `HISTORY_SECONDS` too, as far as `watch` has run.

    `read` gives the answers of the admin API by the doctor's names, `metrics` those in Prometheus' text format, and
    `clock` seconds.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Mapping[str, Json]]],
        metrics: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float],
    ) -> None:
        self._read = read
        self._metrics = metrics
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: Snapshot | None = None
        self._found: list[Finding] = []
        num_kept = round(HISTORY_SECONDS / METRICS_INTERVAL_SECONDS)
        self._past: deque[tuple[float, bytes]] = deque(maxlen=num_kept)  # moments, and metrics, deflated

    async def watch(self) -> None:
        """Store metrics every `METRICS_INTERVAL_SECONDS` for as long as the server runs."""
        while True:
            at, text = self._clock(), await self._metrics()
            self._past.append((at, await asyncio.to_thread(zlib.compress, text, 1)))
            await asyncio.sleep(METRICS_INTERVAL_SECONDS)

    async def report(self) -> Json:
        """Return the findings: at once within a minute of the last report, else after `WINDOW_SECONDS`."""
        async with self._lock:
            if self._last is None or self._clock() - self._last.at >= WINDOW_SECONDS:
                await self._look()
        return {"findings": [finding.to_json() for finding in self._found]}

    async def history(self, seconds: float) -> Json:
        """Return the troubles and the figures of the last `seconds`, as far as metrics were kept; no figures: none
        were.
        """
        now = await self._snapshot()

        def told() -> Json:
            if (kept := self._kept(now.at, seconds)) is None:
                return {"findings": [], "figures": []}
            window = past_window(*kept, now)
            found = [finding.to_json() for finding in ranked(past_findings(window))]
            return {"findings": found, "figures": [figure._asdict() for figure in figures(window)]}

        return await asyncio.to_thread(told)

    async def _look(self) -> None:
        before, after = await self._before(), await self._snapshot()
        self._found = await asyncio.to_thread(self._judged, before, after)
        self._last = after

    def _judged(self, before: Snapshot, after: Snapshot) -> list[Finding]:
        """The present findings, and those of the last minutes that no longer hold."""
        found = findings(before, after)
        if (kept := self._kept(after.at, HISTORY_SECONDS)) is None:
            return found
        known = {finding.name for finding in found}
        return ranked(found + [past for past in past_findings(past_window(*kept, after)) if past.name not in known])

    def _kept(self, now: float, seconds: float) -> tuple[float, Samples] | None:
        """Return the oldest metrics of the last `seconds` with their moment, else the newest older ones; None: there
        are none to compare with, which are `WINDOW_SECONDS` old.
        """
        comparable = [one for one in self._past if now - one[0] > WINDOW_SECONDS]
        if not comparable:
            return None
        at, text = next((one for one in comparable if now - one[0] <= seconds), comparable[-1])
        return at, Samples.parse(_inflated(text).decode())

    async def _before(self) -> Snapshot:
        """Return the last snapshot if it is recent enough, else take one and wait `WINDOW_SECONDS`."""
        if self._last is not None and self._clock() - self._last.at <= STALE_SNAPSHOT_SECONDS:
            return self._last
        first = await self._snapshot()
        await asyncio.sleep(WINDOW_SECONDS)
        return first

    async def _snapshot(self) -> Snapshot:
        at, answers = self._clock(), await self._read()
        await asyncio.sleep(0)  # the loop's others, before the longest turn
        text = (await self._metrics()).decode()
        return await asyncio.to_thread(Snapshot.of, at, text, answers)


def _inflated(text: bytes) -> bytes:
    """The metrics that were kept, if they are no more than `MAX_METRICS_BYTES`; else none."""
    inflating = zlib.decompressobj()
    inflated = inflating.decompress(text, MAX_METRICS_BYTES)
    return inflated if inflating.eof else b""
