"""Who has gone for good, of the clients that have said that they will send no more."""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress


class Hangups:
    """Watches sockets that are read to their end, which the event loop does not: the kernel tells of a reset alone.

    One epoll of its own, since every poller reports a reset that it was not asked for.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._gone: dict[int, Callable[[], object]] = {}
        self._loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, number: int, gone: Callable[[], object]) -> None:
        """Call `gone`, once, when the other end of the descriptor's connection has closed both ways."""
        self._gone[number] = gone
        self._epoll.register(number, 0)

    def forget(self, number: int) -> None:
        """Before the descriptor is closed, or else the next to have its number would be watched."""
        if self._gone.pop(number, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(number)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _look(self) -> None:
        for number, _ in self._epoll.poll(0):
            gone = self._gone.get(number)
            self.forget(number)
            if gone is not None:
                gone()
