"""Rank 0 starts the processes of the other ranks, sends them messages, and notices when one ends."""

import logging
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from backend.errors import BackendError, DeviceError
from backend.own_process import module_command, module_environment
from backend.parallel.messages import STOP, Message, RankSetup

log = logging.getLogger(__name__)

# that a rank's error waits: the rank may have failed because another has ended, which is reported instead
ERROR_DELAY_SECONDS = 0.5
END_DETECTION_SECONDS = 2.0  # in which a process whose connections have closed is found to have ended


@dataclass(slots=True)
class _Fate:
    """The first error of the processes, and the callbacks for it. It outlives `RankProcesses`, to which the watching
    threads must hold no reference.
    """

    on_lost: list[Callable[[DeviceError], object]] = field(default_factory=list)
    error: BackendError | None = None
    is_lost: threading.Event = field(default_factory=threading.Event)
    is_stopping: bool = False

    def lose(self, error: BackendError) -> None:
        """Record the first error, unless all processes are being stopped."""
        if not self.is_stopping and self.error is None:
            self.error = error
            self.is_lost.set()
            if isinstance(error, DeviceError):
                log.critical("%s", error)
                for callback in self.on_lost:
                    callback(error)


@dataclass(slots=True, eq=False)
class _Rank:
    """The process of one rank."""

    number: int
    process: "subprocess.Popen[bytes]"
    pipe: "Connection[Any, Any]"  # on which the rank answers None once it has done as it was told, or sends its error
    answers: "SimpleQueue[BackendError | None]" = field(default_factory=SimpleQueue)

    def follow(self, fate: _Fate) -> None:
        """Receive the rank's answers until it ends."""
        try:
            while (answer := self.pipe.recv()) is None:
                self.answers.put(None)
            fate.is_lost.wait(ERROR_DELAY_SECONDS)
            fate.lose(answer)
        except (EOFError, OSError):
            fate.lose(DeviceError(f"rank {self.number} of the model has ended: {_how(self.process.wait())}"))
        self.answers.put(fate.error)
        self.process.wait()


class RankProcesses:
    """The processes of the ranks from 1 on. Each ends with its pipe, so that none outlives this process."""

    def __init__(self, setups: Iterable[RankSetup]) -> None:
        """Start the processes, which load their parts of the model and report it."""
        self._fate = _Fate()
        self.on_lost = self._fate.on_lost  # called by a thread, with the error that names the rank
        self._ranks = [_start(setup) for setup in setups]
        self._finalizer = weakref.finalize(self, _stop, self._ranks, self._fate)
        for rank in self._ranks:
            name = f"sluice-rank-{rank.number}"
            threading.Thread(target=rank.follow, args=(self._fate,), name=name, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def tell(self, message: Message) -> None:
        """Send a message to every rank. Raises `DeviceError` if one has ended."""
        try:
            for rank in self._ranks:
                rank.pipe.send(message)
        except OSError as error:
            raise self.find_lost() or DeviceError(f"a rank of the model cannot be told anything: {error}") from error

    def await_answers(self) -> None:
        """Wait until every rank has done as it was told. Raises the first error among their answers."""
        for rank in self._ranks:
            if (error := rank.answers.get()) is not None:
                raise error
        if self._fate.error is not None:
            raise self._fate.error

    def find_lost(self) -> DeviceError | None:
        """Return the error that names the rank that has ended; None if none ends within `END_DETECTION_SECONDS`."""
        self._fate.is_lost.wait(END_DETECTION_SECONDS)
        error = self._fate.error
        return error if error is None or isinstance(error, DeviceError) else DeviceError(str(error))

    def end_all(self) -> None:
        """End the processes of all ranks."""
        self._finalizer()


def _start(setup: RankSetup) -> _Rank:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            module_command("backend.parallel.rank_process", theirs.fileno()),
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    with suppress(OSError):  # it has ended, which its watching thread notices
        ours.send(setup)
    return _Rank(setup.rank, process, ours)


def _stop(ranks: list[_Rank], fate: _Fate) -> None:
    fate.is_stopping = True
    for rank in ranks:
        with suppress(OSError):
            rank.pipe.send(STOP)


def _how(status: int) -> str:
    return f"it was killed by signal {-status}" if status < 0 else f"its exit status is {status}"
