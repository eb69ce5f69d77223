"""The store of a gateway without a configured one: a private Redis-protocol server on a unix socket."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import TracebackType

from quotas.embedded.errors import EmbeddedStoreError
from quotas.embedded.server import ServerConnection, SharedServer, StopSignal
from quotas.embedded.server_binary import ServerBinary, find_server
from quotas.embedded.store_directory import StoreDirectory

log = logging.getLogger(__name__)

START_SECONDS = 30.0  # for a server to load its data and answer
LOG_CHECK_SECONDS = 60.0
BACKOFF_SECONDS = (0.0, 0.1, 0.5, 2.0, 5.0)  # between a failure and the next attempt; the last repeats
STEADY_SECONDS = 10.0  # of service, after which a failure counts as the first again


class EmbeddedStore:
    """A server that answers from `start` to `stop`, under one URL, and whose data outlive it.

    One thread keeps it: starts it, waits for its end and starts it again. The kernel ends the server with that thread,
    however the process ends. `start` and `stop` block; a coroutine calls them by `asyncio.to_thread`.

    Gateways on one state directory share one server. The gateway with the folder's owner lock runs it; the others hold
    a connection, and when that ends the first to get the lock runs a server on the same data. A crashed gateway's stale
    socket or running server is replaced.

    The server writes before it answers, so that answered calls survive its end and SIGKILL. A crash of the machine
    loses at most the writes of its last two seconds.
    """

    def __init__(
        self, state_dir: Path, find: Callable[[], ServerBinary] = find_server, start_seconds: float = START_SECONDS
    ) -> None:
        self.failure: EmbeddedStoreError | None = None  # the reason why no server answers now
        self.num_failures = 0
        self._path = state_dir / "store"
        self._find = find
        self._start_seconds = start_seconds
        self._stopping = StopSignal()
        self._started: Future[str] = Future()
        self._thread = Thread(target=self._keep, name="embedded store", daemon=True)

    def start(self) -> str:
        """Start the keeping thread, and return the URL once a server answers there. Raises `EmbeddedStoreError`."""
        self._thread.start()
        try:
            return self._started.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop our server and wait for its end; another gateway's server is left to it. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _keep(self) -> None:
        try:
            directory = StoreDirectory(self._path)
            server = SharedServer(directory, self._find)
            try:
                self._serve(directory, server)
            finally:
                server.release()
                directory.close()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def _serve(self, directory: StoreDirectory, server: SharedServer) -> None:
        """Keep a server answering until told to stop.

        Raises the error that keeps the first server from starting; later errors are logged, and another attempt
        follows.
        """
        failures = 0
        while not self._stopping:
            since = time.monotonic()
            try:
                self._use(directory, server)
                failures = 0 if time.monotonic() - since > STEADY_SECONDS else failures
            except EmbeddedStoreError as error:
                if not self._started.done():
                    raise
                self._note(error)
                server.release()
                self._stopping.wait(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
                failures += 1

    def _use(self, directory: StoreDirectory, server: SharedServer) -> None:
        """Serve from one server until it ends, or until we are told to stop."""
        connection = server.connect(self._start_seconds, self._stopping)
        if connection is None:
            return
        for warning in server.warnings():
            log.warning("store: %s", warning)
        self.failure = None
        if not self._started.done():
            self._started.set_result(directory.url)
        self._watch(connection, server)

    def _watch(self, connection: ServerConnection, server: SharedServer) -> None:
        while not self._stopping.wait(LOG_CHECK_SECONDS, connection):
            server.bound_log()
        connection.close()
        if not self._stopping and not server.is_ours:
            log.warning("store: the gateway that ran it in %s has ended; one that is left runs it anew", self._path)

    def _note(self, error: EmbeddedStoreError) -> None:
        log.error("store: %s; trying again", error)
        self.failure = error
        self.num_failures += 1
