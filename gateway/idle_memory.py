"""Gives memory back to the system that a flood has left free in this process, once nothing is to do."""

import asyncio
import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 2.0
GROWN_BYTES = 16 * 2**20  # since the heap was trimmed last, from which it is worth trimming


async def give_back_when_idle(
    is_idle: Callable[[], bool],
    trim: Callable[[], object] | None = None,
    resident: Callable[[], int] | None = None,
) -> None:
    """Trim the heap each time that the process is idle at two looks in a row and has grown since.

    It is done on a thread, without the interpreter's lock, so that who comes meanwhile is served.
    """
    trim, resident = trim or _malloc_trim(), resident or _resident_bytes
    if trim is None:
        return
    least, was_idle = 0, False
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        idle = is_idle()
        if idle and was_idle and resident() > least + GROWN_BYTES:
            await asyncio.to_thread(trim)
            least = resident()
        was_idle = idle


def _malloc_trim() -> Callable[[], object] | None:
    """Returns glibc's; None where the C library has none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
