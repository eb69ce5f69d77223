"""The one server of a folder, run by the gateway that owns the folder and used by all of them."""

import logging
import time
from collections.abc import Callable
from io import FileIO

from quotas.embedded_errors import ServerUnavailable
from quotas.private_server import PrivateServer
from quotas.server_binary import ServerBinary
from quotas.server_connection import ServerConnection
from quotas.stop_signal import StopSignal
from quotas.store_directory import OTHER_REMEDIES, StoreDirectory

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.01


class SharedServer:
    """Belongs to one thread, which is the parent of the server that it starts."""

    def __init__(self, directory: StoreDirectory, find: Callable[[], ServerBinary]) -> None:
        self._directory = directory
        self._find = find
        self._owner: FileIO | None = None  # the folder's owner lock, while it is ours
        self._own: PrivateServer | None = None
        self._leftover_told = False

    @property
    def is_owned(self) -> bool:
        return self._own is not None

    def connect(self, seconds: float, stopping: StopSignal) -> ServerConnection | None:
        """A connection to the server, which is started where no gateway runs one; None when told to stop.

        Raises `EmbeddedStoreError` when it ends, or does not answer within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not stopping:
            if self._owner is None:
                self._owner = self._directory.try_lock("owner")
            if self._owner is not None:
                self._run()
            if self._own is not None or self._owner is None:
                connection = ServerConnection.open(self._directory.socket)
                if connection is not None:
                    return connection
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"{self._silence()} within {seconds:g} s")
            stopping.wait(RETRY_SECONDS)
        return None

    def warnings(self) -> list[str]:
        return self._own.warnings() if self._own else []

    def bound_log(self) -> None:
        if self._own:
            self._directory.bound_log()

    def release(self) -> None:
        """Stop the server if it is ours, and let another gateway own the folder."""
        if self._own:
            self._own.stop()
        if self._owner:
            self._owner.close()
        self._own = self._owner = None

    def _run(self) -> None:
        """Start our server unless it runs. What an earlier owner left running ends first: it has the same data."""
        if self._own:
            self._own.check_running()
        elif lock := self._directory.try_lock("lock"):
            with lock:
                self._own = PrivateServer(self._directory, self._find(), lock)
        elif not self._leftover_told:
            self._end_leftover()

    def _end_leftover(self) -> None:
        connection = ServerConnection.open(self._directory.socket)
        if connection is not None:
            log.warning("%s in %s has no gateway: ending it", self._directory.locker(), self._directory.path)
            connection.shut_down()
            connection.close()
            self._leftover_told = True

    def _silence(self) -> str:
        directory = self._directory
        if self._own:
            return f"the store's server, process {self._own.pid}, did not answer: see {directory.log}; nothing came"
        if self._owner:
            return f"{directory.locker()} has the data in {directory.path}: end it, {OTHER_REMEDIES}; it did not end"
        return (
            f"another gateway has {directory.path}, but no server answers at {directory.socket} (gateways on several "
            f"machines cannot share a folder): end it, {OTHER_REMEDIES}; nothing came"
        )
