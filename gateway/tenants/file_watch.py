"""Watches files that may be edited while the gateway runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.2  # an edit is noticed after one to three of them

Signature = tuple[tuple[str, int, int, int], ...]


def signature(paths: Iterable[Path]) -> Signature:
    """A value that changes with any of the files: existence, inode, size and time of change of each, its mode's too."""
    return tuple(sorted(entry for path in paths if (entry := _entry(path)) is not None))


def _entry(path: Path) -> tuple[str, int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return str(path), stat.st_ino, stat.st_size, stat.st_ctime_ns


class FileWatcher:
    """Calls `changed` when files have changed and then stood still for an interval, so that none is read half written.

    `files` names them; it is called in a thread, each time. `read` is their signature from before they were first read,
    which may be long ago: an edit since then counts as a change.
    """

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        changed: Callable[[], Awaitable[object]],
        read: Signature,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._files = files
        self._changed = changed
        self._interval = interval
        self._last = read
        self._taken_up: Signature | None = read  # None: to be read again

    async def run(self) -> None:
        """Poll the files every interval, for as long as the server runs."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.poll()
            except Exception:
                log.exception("an edited file could not be read; the next edit will be")

    def read_again(self) -> None:
        """Call `changed` at the next poll also without an edit, since the files could not be read."""
        self._taken_up = None

    async def poll(self) -> None:
        """Compare the files with the last poll, and call `changed` if they changed before it and not since."""
        now = await asyncio.to_thread(lambda: signature(self._files()))
        stood_still, is_new = now == self._last, now != self._taken_up
        self._last = now
        if stood_still and is_new:
            self._taken_up = now
            await self._changed()
