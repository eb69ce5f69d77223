"""Notices that a client has gone: by a lost connection, or by a reset once it sends no more."""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress

from uvicorn.protocols.http.flow_control import FlowControl


class HangupWatcher:
    """Watches sockets whose input has ended for a reset (EPOLLHUP), which the event loop does not.

    It has an epoll of its own, because every epoll reports a reset even if it is asked for nothing.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._loop.add_reader(self._epoll.fileno(), self._poll)

    def watch(self, number: int, on_hangup: Callable[[], object]) -> None:
        """Call `on_hangup`, once, when the other end of the descriptor's connection has closed both ways."""
        self._callbacks[number] = on_hangup
        self._epoll.register(number, 0)

    def forget(self, number: int) -> None:
        """Stop watching a descriptor, before it is closed: the next one with its number would be watched otherwise."""
        if self._callbacks.pop(number, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(number)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _poll(self) -> None:
        for number, _ in self._epoll.poll(0):
            on_hangup = self._callbacks.get(number)
            self.forget(number)
            if on_hangup is not None:
                on_hangup()


class DisconnectNotice:
    """Tells whoever answers a request that its client has gone, by a callback instead of a task that waits for it."""

    __slots__ = ("_callback", "_flow", "_is_gone")

    def __init__(self, flow: FlowControl) -> None:
        self._flow = flow
        self._callback: Callable[[], object] | None = None
        self._is_gone = False

    def watch(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once the client has gone; soon, where it has gone before.

        The body has been read, so the connection reads on: a connection that does not cannot notice its client leave.
        """
        self._callback = callback
        if self._is_gone:
            asyncio.get_running_loop().call_soon(self.notify)
        else:
            self._flow.resume_reading()

    def forget(self) -> None:
        """Call nobody back any more."""
        self._callback = None

    def notify(self) -> None:
        """Call back, because the client has gone or counts as gone; whoever watches later is called back soon."""
        self._is_gone = True
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
