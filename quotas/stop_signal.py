"""A flag that a thread can wait for together with a connection."""

import os
import select
from typing import Protocol


class Readable(Protocol):
    def fileno(self) -> int: ...


class StopSignal:
    """Set once, from any thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC)

    def __bool__(self) -> bool:
        return self._is_set

    def __del__(self) -> None:
        os.close(self._descriptor)

    def set(self) -> None:
        self._is_set = True
        os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float, connection: Readable | None = None) -> bool:
        """Until the flag is set or `connection` has something to read: whether one of them is so after `seconds`."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if connection is not None:
            poll.register(connection, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
