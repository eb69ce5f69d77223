"""Books the KV memory kept by floors and pins, which no request is charged for."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from quotas.reservation import Usage

INTERVAL_SECONDS = 2.0


class UsageStore(Protocol):
    """Stores usage that no limit counts."""

    def book(self, tenant: str, key: str | None, usage: Usage) -> None: ...


class KeptUsage:
    """Books kept idle memory as usage of its tenant, without a key and without requests; whole byte-seconds, each once.

    Together with its requests' byte-seconds they add up to the tenant's whole charge.
    """

    def __init__(
        self,
        kept: Callable[[float], Mapping[str, float]],
        store: UsageStore,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """`kept` returns the block-seconds of each tenant until a moment of the clock, which never go down."""
        self._kept = kept
        self._store = store
        self._block_bytes = block_bytes
        self._clock = clock
        self._booked: dict[str, int] = {}  # byte-seconds

    def book(self) -> None:
        """Book what was kept since the last call."""
        for tenant, block_seconds in self._kept(self._clock()).items():
            total, booked = int(block_seconds * self._block_bytes), self._booked.get(tenant, 0)
            if total > booked:
                self._booked[tenant] = total
                self._store.book(tenant, None, Usage(kv_byte_seconds=total - booked, requests=0))

    async def run(self) -> None:
        """Book at intervals for as long as the server runs, and once more as it ends."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_SECONDS)
                self.book()
        finally:
            self.book()
