"""One connection to the store: commands go out in order, the answers come back in the same order."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from quotas.errors import ConnectionLost, StoreUnavailable

CHECKS_PER_TIMEOUT = 4  # in one timeout: between two, the loop reads all input
NOT_ENOUGH = object()  # the reader's result for an incomplete answer
MAX_COMMANDS_PER_WRITE = 64  # the store works on them during a long turn
GRACE_SECONDS = 0.005  # for the loop to read once more before a command fails


Awaited = tuple[asyncio.Future[Any], float, int, list[Any] | None]
"""The future of commands, the attended time of their submission, their number, and of several the answers so far."""


def copy_of(error: StoreUnavailable) -> StoreUnavailable:
    """A copy of the error, since each exception is raised once."""
    return type(error)(*error.args)


class RedisLink(asyncio.Protocol):
    """A pipeline in which commands of one turn of the loop share writes, of `MAX_COMMANDS_PER_WRITE` each.

    The first command without an answer in time ends the link. The link takes over the transport of a connection that
    redis-py has made, so that only a plain call is between the transport and the answers.

    Only time in which this process ran counts: between two checks, however late the second comes, at most the planned
    interval. So a loop that stands still for seconds, or a starved machine, is not taken for a slow store: its answers
    are read before the deadline is judged.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        timeout: float,
        on_end: Callable[["RedisLink", StoreUnavailable], None],
    ) -> None:
        """`connection` is connected, and owned from now on. `on_end` is called before others learn of the end."""
        self._connection = connection
        self.timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._awaited: deque[Awaited] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._attended = 0.0  # seconds in which this process could read answers, up to the last check
        self._checked_at = 0.0  # moment of the last check, by the loop's clock
        self._pause = 0.0  # planned seconds to the next check
        self._suspect: tuple[asyncio.Future[Any], int] | None = None  # overdue at the last check, with so few answers
        self._on_end = on_end
        self._ended: StoreUnavailable | None = None
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=NOT_ENOUGH
        )
        self._transport: asyncio.WriteTransport = connection._writer.transport  # type: ignore[union-attr]
        self._transport.set_protocol(self)

    def submit(self, packed: bytes) -> asyncio.Future[Any]:
        """Send a command in RESP, and return the future of its answer or of its error: `ResponseError`,
        `StoreUnavailable`.
        """
        return self._submit((packed,), None)

    def submit_all(self, packed: Sequence[bytes]) -> asyncio.Future[list[Any]]:
        """Send commands in this order, and return the future of their answers, each a `ResponseError` where there was
        one; or of `StoreUnavailable`. They share writes with other commands of the turn, of about
        `MAX_COMMANDS_PER_WRITE` each. `timeout` bounds the attended time to the first answer, and from then on the
        wait for each next one, not that for all. A future and a callback for each would take more time than the
        answers.
        """
        return self._submit(packed, [])

    def _submit(self, packed: Sequence[bytes], answers: list[Any] | None) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if self._ended is not None:
            future.set_exception(copy_of(self._ended))
            return future
        if not packed:
            future.set_result(answers)
            return future
        if self._watch is None:
            self._check_in(self.timeout / CHECKS_PER_TIMEOUT)
        self._awaited.append((future, self._attended + self._since_check(), len(packed), answers))
        if not self._outgoing:
            self._loop.call_soon(self._write)
        self._outgoing += packed
        if len(self._outgoing) >= MAX_COMMANDS_PER_WRITE:
            self._write()
        return future

    def end(self, reason: StoreUnavailable) -> None:
        """Give up: every pending or later command fails for this reason."""
        if self._ended is not None:
            return
        self._ended = reason
        self._on_end(self, reason)
        if self._watch is not None:
            self._watch.cancel()
        for future, *_ in self._awaited:
            if not future.done():
                future.set_exception(copy_of(reason))
        self._awaited.clear()

    async def close(self) -> None:
        self.end(ConnectionLost("the connection to the quota store was closed"))
        with suppress(RedisError, OSError):
            await self._connection.disconnect(nowait=True)

    def _write(self) -> None:
        commands, self._outgoing = self._outgoing, []
        if commands and self._ended is None:
            self._transport.write(b"".join(commands))

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        try:
            reader.feed(data)
            while self._ended is None and (answer := reader.gets()) is not NOT_ENOUGH:
                self._deliver(answer)
        except RedisError as error:
            self.end(ConnectionLost(f"the quota store closed the connection: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(ConnectionLost(f"the quota store closed the connection: {error or 'Connection closed by server.'}"))

    def _deliver(self, answer: Any) -> None:
        if isinstance(answer, ServerGone):  # such as LOADING
            raise answer
        future, _, count, answers = self._awaited[0]
        if answers is not None:
            answers.append(answer)
            if len(answers) < count:
                return
            answer = answers
        self._awaited.popleft()
        if future.done():
            return  # its caller was cancelled
        if isinstance(answer, ResponseError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _check(self) -> None:
        """End the link if the oldest command is overdue for the second time: the loop has read in between."""
        self._watch = None
        self._attended += self._since_check()
        if not self._awaited:
            return
        oldest, submitted, _, answers = self._awaited[0]
        suspect = oldest, len(answers or ())
        is_overdue = self._attended - submitted >= self.timeout
        if is_overdue and suspect == self._suspect:
            self.end(StoreUnavailable(f"the quota store did not answer within {self.timeout * 1000:g} ms"))
            return
        self._suspect = suspect if is_overdue else None
        self._check_in(GRACE_SECONDS if is_overdue else self.timeout / CHECKS_PER_TIMEOUT)

    def _check_in(self, seconds: float) -> None:
        self._checked_at, self._pause = self._loop.time(), seconds
        self._watch = self._loop.call_later(seconds, self._check)

    def _since_check(self) -> float:
        """The attended seconds since the last check."""
        return min(self._loop.time() - self._checked_at, self._pause)


@lru_cache(maxsize=4096)
def number_word(value: int) -> bytes:
    """A whole number as a word, cached: counts of requests and tokens recur."""
    return word(b"%d" % value)


def word(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def words(*arguments: bytes) -> bytes:
    return b"".join(map(word, arguments))


def command(*arguments: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(arguments), words(*arguments))
