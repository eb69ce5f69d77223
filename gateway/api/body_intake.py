"""Bodies on their way in: how many bytes of each tenant may wait to be parsed, and whose turn it is to be."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.types import Receive, Scope

from gateway.errors import ConcurrencyExceeded
from gateway.http.json_body import BLOCK, JsonBody, JsonScanner
from gateway.http.request_scope import BodyParts
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.auth import Principal

INLINE = 8_192  # bytes that are parsed, or rendered, on the loop itself: a millisecond at most
RETRY_SECONDS = 1.0

T = TypeVar("T")


class Intake:
    """One per process, owned by its event loop.

    A body is scanned as it comes, a block at a time, and parsed on a thread where it is not small: Python code lets the
    interpreter lock go every 0.1 ms, and what the parser does at once takes 2 ms at most. Tenants take turns at both,
    so that many bodies of one delay one of another by no more than a turn.
    """

    def __init__(self, max_body_bytes: int, max_unparsed_bytes: int, timeout: float, max_model_len: int) -> None:
        """`max_unparsed_bytes` are those of a tenant; each of its keys has half of them. `timeout` is in seconds."""
        self._max_body_bytes = max_body_bytes
        self._max_unparsed_bytes = max_unparsed_bytes
        self._timeout = timeout
        self._max_model_len = max_model_len
        self._rooms: dict[tuple[str, str | None], _Room] = {}
        self._scans = Turns()
        self._works = Turns()
        self._encoding: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(
        self,
        scope: Scope,
        receive: Receive,
        principal: Principal,
        record: RequestRecord,
        parse: Callable[[JsonBody], T],
    ) -> T:
        """What `parse` makes of the body. Raises `ApiError` and `ClientGone`."""
        parts = BodyParts(scope, receive, self._max_body_bytes, self._timeout)
        if parts.most <= BLOCK:  # a connection buffers as much of any request
            return await self._read(parts, principal.tenant, record, parse)
        async with self._room(principal, parts.most):
            return await self._read(parts, principal.tenant, record, parse)

    async def work(self, tenant: str, size: int, function: Callable[[], T]) -> T:
        """Run what takes long where `size`, in bytes, is large: then on the thread."""
        if size <= INLINE:
            return function()
        async with self._works.of(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def one_text_of(self, tenant: str) -> asyncio.Lock:
        """To be held while a long text of the tenant is encoded."""
        return self._encoding.setdefault(tenant, asyncio.Lock())

    def close(self) -> None:
        """Ends the thread; what still waits for it is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, parts: BodyParts, tenant: str, record: RequestRecord, parse: Callable[[JsonBody], T]) -> T:
        scanner, rest = JsonScanner(self._max_model_len), bytearray()
        while parts.more:
            rest += await parts.next()
            record.body_bytes = parts.size
            while len(rest) > BLOCK:
                async with self._scans.of(tenant):
                    scanner.feed(bytes(rest[:BLOCK]))
                del rest[:BLOCK]
        scanner.feed(bytes(rest))
        body = scanner.body()
        return await self.work(tenant, len(body), lambda: parse(body))

    @asynccontextmanager
    async def _room(self, principal: Principal, size: int) -> AsyncIterator[None]:
        """Hold so many of the bytes that a key and its tenant may have unparsed."""
        async with self._of_key(principal).of(size, self._timeout), self._of_tenant(principal).of(size, self._timeout):
            yield

    def _of_key(self, principal: Principal) -> "_Room":
        return self._rooms.setdefault(
            (principal.tenant, principal.key_id), _Room("API key", self._max_unparsed_bytes // 2)
        )

    def _of_tenant(self, principal: Principal) -> "_Room":
        return self._rooms.setdefault((principal.tenant, None), _Room("tenant", self._max_unparsed_bytes))


class Turns:
    """Lets one piece of work pass at a time, and none of them twice in a turn of the loop; tenants in rotation."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self._is_taken = False

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        if self._is_taken:
            await self._wait(tenant)
        self._is_taken = True
        try:
            yield
        finally:
            asyncio.get_running_loop().call_soon(self._pass_on)

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it had come just then
            raise

    def _pass_on(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                self._is_taken = True


class _Room:
    """Bytes that may be held at once; whoever finds too few waits for them, in the order of arrival."""

    def __init__(self, owner: str, size: int) -> None:
        self._owner = owner
        self._size = self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, size: int, timeout: float) -> AsyncIterator[None]:
        """Raises `ConcurrencyExceeded` where they are not free within so many seconds."""
        await self._take(size, timeout)
        try:
            yield
        finally:
            self._free += size
            self._admit()

    async def _take(self, size: int, timeout: float) -> None:
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        self._admit()
        try:
            async with asyncio.timeout(timeout):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._free += size
            granted.cancel()
            self._admit()
            if not isinstance(error, TimeoutError):
                raise
            raise ConcurrencyExceeded(
                f"Your {self._owner} has had {self._size} bytes of request bodies under way for {timeout:g} s, its "
                "limit: send fewer large bodies at once, or send them faster.",
                retry_after=RETRY_SECONDS,
            ) from None

    def _admit(self) -> None:
        while self._waiting:
            size, granted = self._waiting[0]
            if not granted.done():
                if size > self._free:
                    return
                self._free -= size
                granted.set_result(None)
            self._waiting.popleft()
