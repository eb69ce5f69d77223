"""The calls of endpoints to the store of files and batches, by name: HTTP workers make them in the engine's process."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.telemetry.metrics.batches import BatchCounts
from quotas.store.batches import BatchStore

CANCELLABLE = ("validating", "in_progress")


class BatchRecords:
    """Answers by name. Every call may raise `QuotaError`."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self.counts = BatchCounts()
        self.on_change: list[Callable[[str], object]] = []  # called with the id of a batch that was opened or cancelled
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "file": store.file,
            "files": store.files,
            "file_bytes": store.file_bytes,
            "put_file": store.put_file,
            "delete_file": store.delete_file,
            "batch": store.batch,
            "read": store.read,
            "batches": store.batches,
            "open_of": store.open_of,
            "open": self._open,
            "cancel": self._cancel,
        }

    async def call(self, what: str, *told: Any) -> Any:
        return await self._calls[what](*told)

    async def _open(self, tenant: str, name: str, fields: dict[str, str], most: int) -> bool:
        is_open = await self.store.open(tenant, name, fields, most)
        if is_open:
            self._changed(name)
        return is_open

    async def _cancel(self, tenant: str, name: str) -> bool:
        """Returns False if the batch had ended, or was cancelled already."""
        stamp = {"status": "cancelling", "cancelling_at": str(int(time.time()))}
        is_cancelled = await self.store.update(tenant, name, stamp, statuses=CANCELLABLE)
        if is_cancelled:
            self._changed(name)
        return is_cancelled

    def _changed(self, name: str) -> None:
        for listener in self.on_change:
            listener(name)
