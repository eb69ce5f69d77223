"""Reads and parses request bodies, with a limit on the bytes of each tenant that are not yet parsed, and in turns."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.types import Receive, Scope

from backend.text.tokenizer import Tokenizer
from gateway.errors import ConcurrencyExceeded
from gateway.http.json_body import BLOCK_BYTES, JsonBody, JsonScanner
from gateway.http.request_scope import BodyParts
from gateway.settings.settings import Settings
from gateway.telemetry.request_record import RequestRecord
from quotas.policy.units import show_size

INLINE_BYTES = 8_192  # of a body that the event loop parses or renders itself, in a millisecond at most
RETRY_SECONDS = 1.0

T = TypeVar("T")


class BodyReader:
    """Reads bodies; there is one per process, owned by its event loop.

    A body that is not small is scanned as it comes, a block at a time, and parsed on a thread, where Python code
    releases the interpreter lock every 0.1 ms and the parser once it is done. Tenants take turns at both, so that many
    bodies of one tenant delay a body of another by no more than one turn.
    """

    def __init__(self, max_body_bytes: int, max_unparsed_bytes: int, timeout: float, max_model_len: int) -> None:
        """Bytes of bodies not yet parsed: `max_unparsed_bytes` for each tenant, and half of them for each of its keys.
        `timeout` is in seconds.
        """
        self._max_body_bytes = max_body_bytes
        self._max_unparsed_bytes = max_unparsed_bytes
        self._timeout = timeout
        self._max_model_len = max_model_len
        self._unparsed: dict[tuple[str, str | None], _ByteSemaphore] = {}  # by tenant and key; None: the tenant
        self._scan_lock = RoundRobinLock()
        self._thread_lock = RoundRobinLock()
        self._encode_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(
        self,
        scope: Scope,
        receive: Receive,
        tenant: str,
        key: str,
        record: RequestRecord,
        parse: Callable[[JsonBody], T],
    ) -> T:
        """Read the body and return what `parse` makes of it. Raises `ApiError` and `ClientGone`."""
        parts = BodyParts(scope, receive, self._max_body_bytes, self._timeout)
        try:
            if parts.max_size <= INLINE_BYTES:  # too short to have more elements than a body may have
                raw = b""
                while parts.more:
                    raw += await parts.next()
                return parse(JsonBody(raw))
            if parts.max_size <= BLOCK_BYTES:  # a connection buffers this much of any request
                return await self._read(parts, tenant, parse)
            async with self._reserve_bytes(tenant, key, parts.max_size):
                return await self._read(parts, tenant, parse)
        finally:
            record.body_bytes = parts.size

    async def offload(self, tenant: str, size: int, function: Callable[[], T]) -> T:
        """Run a function whose time grows with `size`, in bytes: on the thread if that is large."""
        if size <= INLINE_BYTES:
            return function()
        await self._thread_lock.acquire(tenant)
        return await _run(self._thread, function, self._thread_lock.release)

    async def encode(self, tenant: str, tokenizer: Tokenizer, function: Callable[[], T]) -> T:
        """Run a function that encodes long texts on the tokenizer's threads, one of the tenant at a time."""
        lock = self._encode_locks.setdefault(tenant, asyncio.Lock())
        await lock.acquire()
        return await _run(tokenizer.pool, function, lock.release)

    def close(self) -> None:
        """End the thread; work that still waits for it is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, parts: BodyParts, tenant: str, parse: Callable[[JsonBody], T]) -> T:
        scanner, rest = JsonScanner(self._max_model_len), bytearray()
        while parts.more:
            rest += await parts.next()
            while len(rest) > BLOCK_BYTES:
                async with self._scan_lock.hold(tenant):
                    scanner.feed(bytes(rest[:BLOCK_BYTES]))
                del rest[:BLOCK_BYTES]
        scanner.feed(bytes(rest))
        body = scanner.body()
        return await self.offload(tenant, len(body), lambda: parse(body))

    @asynccontextmanager
    async def _reserve_bytes(self, tenant: str, key: str, size: int) -> AsyncIterator[None]:
        """Hold `size` of the bytes that a key and its tenant may have unparsed."""
        of_key, of_tenant = self._semaphore(tenant, key), self._semaphore(tenant, None)
        async with of_key.hold(size, self._timeout), of_tenant.hold(size, self._timeout):
            yield

    def _semaphore(self, tenant: str, key: str | None) -> "_ByteSemaphore":
        """The semaphore of a key; with None that of the whole tenant."""
        semaphore = self._unparsed.get((tenant, key))
        if semaphore is None:
            owner, share = ("tenant", 1) if key is None else ("API key", 2)
            semaphore = self._unparsed[tenant, key] = _ByteSemaphore(owner, self._max_unparsed_bytes // share)
        return semaphore


async def _run(pool: ThreadPoolExecutor, function: Callable[[], T], release: Callable[[], None]) -> T:
    """Run a function on a thread, and `release` once it has ended there, even if its caller was cancelled before."""
    loop = asyncio.get_running_loop()

    def ended(_: object) -> None:
        with suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(release)

    try:
        work = pool.submit(function)
    except BaseException:
        release()
        raise
    work.add_done_callback(ended)
    return await asyncio.wrap_future(work)


@asynccontextmanager
async def open_body_reader(settings: Settings, max_model_len: int) -> AsyncIterator[BodyReader]:
    """Yield a reader as the settings bound it, which ends with the block."""
    reader = BodyReader(settings.max_body_bytes, settings.max_unparsed_bytes, settings.body_timeout, max_model_len)
    try:
        yield reader
    finally:
        reader.close()


class RoundRobinLock:
    """A lock that tenants hold in rotation, and that changes hands at most once in a turn of the event loop, so that
    other callbacks run between two holders that never block.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self._is_taken = False

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, tenant: str) -> None:
        if self._is_taken:
            await self._wait(tenant)
        self._is_taken = True

    def release(self) -> None:
        asyncio.get_running_loop().call_soon(self._release)

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # it was granted just then
            raise

    def _release(self) -> None:
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


class _ByteSemaphore:
    """Bounds the bytes held at once; a request that finds too few of them free waits, first come first served."""

    def __init__(self, owner: str, size: int) -> None:
        self._owner = owner
        self._size = self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int, timeout: float) -> AsyncIterator[None]:
        """Hold `size` bytes. Raises `ConcurrencyExceeded` if they are not free within `timeout` seconds."""
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
                f"Your {self._owner} has had {show_size(self._size)} of request bodies under way for {timeout:g} s, "
                "its limit: send fewer large bodies at once, or send them faster.",
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
