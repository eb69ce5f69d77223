"""The HTTP server: the port it listens on, and its orderly end (a drain)."""

import asyncio
import errno
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvicorn

from gateway.background import wait_awake
from gateway.errors import ShuttingDown
from gateway.http.acceptor import Acceptor
from gateway.http.connection import DEAD_PEER_SECONDS, DiscardPace, HangupWatcher, HttpConnection, bound_socket
from gateway.http.connection_table import ConnectionEntry, ConnectionTable
from gateway.http.request_scope import ActiveRequests
from gateway.settings.settings import Settings
from quotas.policy.units import counted

PRIVILEGED_PORTS = 1024
BACKLOG = 65_535  # connections before `accept`; the kernel caps it at net.core.somaxconn


class ListenError(Exception):
    """A port cannot be served; the message names the flag to change."""


def open_port(host: str, port: int, prefix: str = "--") -> socket.socket:
    """A socket bound to the --host and --port flags' values. Raises `ListenError`."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise ListenError(why_not_listening(error, host, port, prefix)) from None


@contextmanager
def open_ports(host: str, port: int, count: int) -> Iterator[list[socket.socket]]:
    """Yield `count` sockets bound to one port, among which the kernel divides its connections. Raises `ListenError`."""
    with open_port(host, port) as alone:  # fails if another gateway has the port
        if count == 1:
            yield [alone]
            return
        port = alone.getsockname()[1]
    with ExitStack() as stack:
        yield [stack.enter_context(bound_socket(host, port, shared=True)) for _ in range(count)]


def why_not_listening(error: OSError, host: str, port: int, prefix: str = "--") -> str:
    """The reason why a port cannot be served, and the flags that change it; raises any other error."""
    address, other_port = f"{host}:{port}", f"with {prefix}port"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: choose another with {prefix}host"
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use: stop what listens there, or choose another port {other_port}"
    if error.errno == errno.EACCES and port < PRIVILEGED_PORTS:
        return f"{address} needs privileges that this user lacks: choose a port above 1023 {other_port}"
    raise error


def http_config(settings: Settings) -> uvicorn.Config:
    """Returns uvicorn's configuration. The application is set later, and each server makes its own connections."""
    return uvicorn.Config(
        app=_nothing,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.idle_timeout,  # type: ignore[arg-type]  # seconds; a float works
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
    )


def check_tls(settings: Settings) -> None:
    """Raises `ListenError` for a certificate and a key with which no port could be served."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except OSError as error:
        raise ListenError(
            f"TLS cannot be served with --tls-cert-file {settings.tls_cert_file} and --tls-key-file "
            f"{settings.tls_key_file}: {error}; they must be PEM, and belong together"
        ) from None


async def _nothing(scope: object, receive: object, send: object) -> None:
    """Stands in for the application until it is made."""


@contextmanager
def on_signals(callback: Callable[[], object]) -> Iterator[None]:
    """Call back on every SIGINT and SIGTERM while the block runs."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class HttpServer(uvicorn.Server):
    """Serves the given sockets, to as many connections as `table` allows.

    A TLS handshake may take as long as headers may, where uvicorn would leave it the loop's 60 s.
    """

    prefix = "--"  # of the flags that choose its port

    def __init__(self, settings: Settings, table: ConnectionTable) -> None:
        super().__init__(http_config(settings))
        self.table = table
        self._header_timeout = settings.header_timeout
        self._write_timeout = settings.write_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._hangup_watcher = HangupWatcher()
        self._discard_pace = DiscardPace(asyncio.get_running_loop().time)
        for sock in sockets or ():
            self.servers.append(self._listen(sock))  # type: ignore[arg-type]  # it has the methods that uvicorn calls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._hangup_watcher.close()

    def _listen(self, sock: socket.socket) -> Acceptor:
        """Accept connections. Raises `ListenError`: of two processes that have bound a port only one can listen."""
        # of unacknowledged data or unanswered probes: to Linux a reader that stops is one of these, and has its time
        timeout_s = max(DEAD_PEER_SECONDS, self._write_timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * timeout_s))
        try:
            sock.listen(BACKLOG)
        except OSError as error:
            host, port, *_ = sock.getsockname()
            raise ListenError(why_not_listening(error, host, port, self.prefix)) from None
        return Acceptor(sock, self.table, self._connection, self.config.ssl, self._header_timeout)

    def _connection(self, entry: ConnectionEntry) -> HttpConnection:
        return HttpConnection(
            self.config,
            self.server_state,
            self.lifespan.state,
            entry,
            self._hangup_watcher,
            self._discard_pace,
            self._header_timeout,
            self._write_timeout,
        )


log = logging.getLogger(__name__)

END_SECONDS = 2.0  # for cancelled requests to end


class Server(HttpServer):
    """Serves the tenants' port, calls `on_started` once it does, and drains when it is told to stop.

    While it drains it is not ready. It goes on serving for `drain_delay`; then it refuses new requests, and those in
    flight have `drain_timeout` to end by themselves before they are ended with an error. The port closes last.
    """

    def __init__(self, settings: Settings, active_requests: ActiveRequests, on_started: Callable[[], object]) -> None:
        super().__init__(settings, ConnectionTable(settings.max_connections, settings.max_connections_per_peer))
        self._active_requests = active_requests
        self._on_started = on_started
        self._delay = settings.drain_delay
        self._timeout = settings.drain_timeout
        self._hurry = asyncio.Event()

    def drain(self) -> None:
        """Stop serving in an orderly way, as the class says."""
        if not self.should_exit:
            self.should_exit = True
            if not self._delay:
                self._active_requests.close()  # `shutdown` is called up to 0.1 s later, when uvicorn next looks
            log.info("draining: %s in flight", counted(len(self.server_state.tasks), "request"))

    def end(self) -> None:
        """Stop now: requests in flight are ended with an error."""
        self.should_exit = self.force_exit = True
        self._hurry.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal drains, the second ends now. Uvicorn would raise it again before `serve` has cleaned up."""
        with on_signals(self._signalled):
            yield

    def _signalled(self) -> None:
        if self.should_exit:
            self.end()
        else:
            self.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._wait(self._delay)
        self._active_requests.close()
        until = asyncio.get_running_loop().time() + self._timeout
        tasks = set(self.server_state.tasks)
        for connection in self._answering():
            connection.shutdown()
        if await self._unfinished(tasks):
            await self._fail_all(tasks)
        left = until - asyncio.get_running_loop().time()  # for answers on their way to slow readers
        self.config.timeout_graceful_shutdown = max(END_SECONDS, left)  # type: ignore[assignment]
        await super().shutdown(sockets)

    async def _wait(self, seconds: float) -> None:
        """Wait `seconds`, or until `end` is called."""
        hurried = asyncio.create_task(self._hurry.wait())
        try:
            await wait_awake(seconds, hurried)
        finally:
            hurried.cancel()

    async def _unfinished(self, tasks: set[asyncio.Task[None]]) -> bool:
        """Wait for the tasks; returns True if some outlast their time."""
        if not tasks:
            return False
        timer = asyncio.create_task(self._wait(self._timeout))
        ended = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait({timer, ended}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        return not ended.done()

    async def _fail_all(self, tasks: set[asyncio.Task[None]]) -> None:
        """Send every client an error. A client that does not read, or has not sent its whole request, is
        disconnected.
        """
        num_ended = sum(not task.done() for task in tasks)
        log.warning("%s ended: the time to end by themselves is over", counted(num_ended, "request"))
        self._active_requests.fail_all(ShuttingDown())
        ended = asyncio.create_task(asyncio.wait(tasks))
        await wait_awake(END_SECONDS, ended)
        ended.cancel()
        for connection in self._answering():
            connection.drop(ShuttingDown())

    def _answering(self) -> list[HttpConnection]:
        connections = [c for c in self.server_state.connections if isinstance(c, HttpConnection)]
        return [connection for connection in connections if connection.is_answering]
