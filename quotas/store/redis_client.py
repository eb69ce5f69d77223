"""The permanent connection to the store: bounded waits, and none while the store is known to hang."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import (
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from quotas.errors import ConnectionLost, NotSent, QuotaError, StoreFault, StoreUnavailable
from quotas.store.redis_link import RedisLink, command

log = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0  # for the handshake, in the background
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.02, 1.0  # between attempts to connect
NOT_SERVING = (ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)  # LOADING ends the connection itself
NOT_SERVING_CODES = ("BUSY", "MISCONF", "NOREPLICAS")  # for which redis-py has no class
WRONG_TYPE = "WRONGTYPE"
PROBE = command(b"SET", b"sluice:probe", b"1", b"PX", b"1000")  # a write: a read-only server still reads
PROBE_SECONDS = 1.0  # between two probes
Prepare = Callable[[RedisLink], Awaitable[None]]


class RedisClient:
    """One pipelined connection, remade when it breaks. A call of one command takes `timeout` seconds at
    most, one of several (`send_all`) so long for each answer.

    When one gets no answer within them, the circuit opens: calls fail at once until a connection in the background has
    answered a PING. When the connection breaks, calls wait, no longer than `timeout`, for the one immediate attempt to
    reconnect. `prepare` runs on each connection before it is used.
    """

    def __init__(self, url: str, timeout: float = 0.25, prepare: Prepare | None = None) -> None:
        """`url` is one of redis-py: redis://, rediss:// or unix://, with user, password and TLS options."""
        self.timeout = timeout
        self.prepare = prepare
        self._pool = ConnectionPool.from_url(
            url, protocol=2, socket_timeout=None, socket_connect_timeout=CONNECT_SECONDS
        )
        self.returned = asyncio.Event()  # set with each new connection
        self.num_links = 0  # ever: a later one may lead to another server
        self.num_outages = 0
        self._is_out = False
        self._has_served = False  # ever
        self._link: RedisLink | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None  # while a reachable server does not serve
        self._ended = asyncio.Event()  # set at the end of the link in use
        self._attempted = asyncio.Event()  # unset during the one attempt that calls wait for
        self._reason = StoreUnavailable("the quota store is not connected")
        self._refused: QuotaError | None = None  # the last failure to connect

    @property
    def is_connected(self) -> bool:
        """True if the server is reachable, and accepted the last write."""
        return self._link is not None and self._prober is None

    async def connect(self) -> None:
        """Connect, and stay connected from now on. If the first attempt fails, its `QuotaError` is raised, and further
        attempts go on in the background.
        """
        self._connecting = asyncio.create_task(self._stay_connected())
        await self._attempted.wait()
        if self._refused is not None:
            raise self._refused

    async def close(self) -> None:
        tasks = [task for task in (self._connecting, self._prober) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
        self._reason = StoreUnavailable("the quota store was closed")

    async def execute(self, *arguments: bytes) -> Any:
        """Return the answer to a command. Raises `StoreUnavailable`, and `StoreFault` for any other error of the
        server, such as that of a key of another type.
        """
        try:
            return await self.send(command(*arguments))
        except ResponseError as error:
            raise _fault(error) from error

    async def send(self, packed: bytes) -> Any:
        """Return the answer to a command in RESP.

        A server's error is raised as `ResponseError` if the caller may handle it, as `StoreUnavailable` if the server
        does not serve.
        """
        link = self._link or await self._reconnected()
        try:
            return await link.submit(packed)
        except ResponseError as error:
            if (reason := self._outage(error, link)) is None:
                raise
            raise reason from error

    async def send_all(self, packed: Sequence[bytes]) -> list[Any]:
        """Return the answers to commands that share writes; that about a key of another type than the command's is a
        `ResponseError` in its place. Raises `StoreUnavailable`, and `StoreFault` for any other error of the server.
        `timeout` bounds the wait for each answer, not that for all.
        """
        link = self._link or await self._reconnected()
        answers = await link.submit_all(packed)
        for error in answers:
            if isinstance(error, ResponseError) and not str(error).startswith(WRONG_TYPE):
                raise self._outage(error, link) or _fault(error) from error
        return answers

    def submit(self, packed: bytes, answered: Callable[[Any], object]) -> bool:
        """Send a command without a task that waits: `answered` is called with its answer, or with the exception that
        `send` would raise. Returns whether there is a connection to send it on.
        """
        if (link := self._link) is None:
            return False

        def done(answer: "asyncio.Future[Any]") -> None:
            error = answer.exception()
            if isinstance(error, ResponseError):
                error = self._outage(error, link) or error
            answered(answer.result() if error is None else error)

        link.submit(packed).add_done_callback(done)
        return True

    def _outage(self, error: ResponseError, link: RedisLink) -> StoreUnavailable | None:
        """The outage that a server's error means, which is probed from now on; None if it means none."""
        if not isinstance(error, NOT_SERVING) and not str(error).startswith(NOT_SERVING_CODES):
            return None
        said, _, _ = str(error).partition(" script: ")  # the script's name does not matter
        reason = StoreUnavailable(f"the quota store does not serve: {said}")
        if isinstance(error, ReadOnlyError):
            link.end(reason)  # after a failover another server stands behind the address
        elif self._prober is None:
            self._outage_begins(reason)
            self._prober = asyncio.create_task(self._probe(link))
        return reason

    async def _probe(self, link: RedisLink) -> None:
        """Wait until the server takes writes again, or is lost. It answers meanwhile, so the link stays in use."""
        while link is self._link:
            await asyncio.sleep(PROBE_SECONDS)
            with suppress(RedisError, QuotaError):
                await link.submit(PROBE)
                self._outage_ends()
                break
        self._prober = None

    async def _reconnected(self) -> RedisLink:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                await self._attempted.wait()
        if self._link is None:
            raise NotSent(*self._reason.args)
        return self._link

    async def _stay_connected(self) -> None:
        delay = 0.0
        while True:
            await asyncio.sleep(delay)
            try:
                link = await self._connected()
            except QuotaError as error:
                self._refused, self._reason = error, StoreUnavailable(str(error))
                self._outage_begins(error)
                delay = random.uniform(0.5, 1) * min(max(2 * delay, FIRST_DELAY_SECONDS), MAX_DELAY_SECONDS)
                self._attempted.set()
                continue
            self._ended.clear()
            self._link, self._refused = link, None
            self.num_links += 1
            self._attempted.set()
            self._outage_ends()
            await self._ended.wait()
            await link.close()
            delay = 0.0

    def _on_end(self, link: RedisLink, reason: StoreUnavailable) -> None:
        if link is not self._link:
            return  # it was never in use
        self._link, self._reason = None, reason
        self._ended.set()
        if isinstance(reason, ConnectionLost):
            self._attempted.clear()
        else:
            self._outage_begins(reason)

    def _outage_begins(self, reason: QuotaError) -> None:
        if not self._is_out:
            self.num_outages += 1
            if self._has_served:  # the first connection's failure is raised instead
                log.error("each tenant's on_store_outage applies: %s", reason)
        self._is_out = True

    def _outage_ends(self) -> None:
        if self._is_out and self._has_served:
            log.warning("the quota store serves again")
        self._is_out, self._has_served = False, True
        self.returned.set()

    async def _connected(self) -> RedisLink:
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, RedisError | OSError):
                reason = str(error) or f"no connection within {CONNECT_SECONDS:g} s"
                raise StoreUnavailable(f"the quota store cannot be reached: {reason}") from error
            raise
        link = RedisLink(connection, CONNECT_SECONDS, self._on_end)
        try:
            await self._check_link(link)
        except BaseException:
            await link.close()
            raise
        link.timeout = self.timeout
        return link

    async def _check_link(self, link: RedisLink) -> None:
        try:
            await link.submit(command(b"PING"))
            if self.prepare is not None:
                await self.prepare(link)
        except RedisError as error:
            raise StoreFault(f"the quota store gave an invalid answer: {error}") from error


def _fault(error: ResponseError) -> StoreFault:
    return StoreFault(f"the quota store answered with an error: {error}")
