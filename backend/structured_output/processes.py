"""The engine's side of its grammar processes: it starts, kills and replaces them."""

import json
import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from backend.errors import GrammarInvalid
from backend.grammar import Grammar
from backend.own_process import module_command, module_environment
from backend.structured_output.frames import receive_frame, send_frame
from backend.structured_output.mask_time import MaskTime
from backend.structured_output.process_setup import ProcessSetup

log = logging.getLogger(__name__)

MASKS_TIMEOUT_SECONDS = 2  # that a process may take for a step's masks, far beyond what the limits of its work allow
COMPILE_WALL_SECONDS = 20.0  # in which a grammar that was found valid is compiled where it matches
START_TIMEOUT_SECONDS = 60.0  # in which a vocabulary can be taken in
FORK_TIMEOUT_SECONDS = 60.0  # in which a fork is done, or a dead process reaped, on however busy a machine
NONE_STARTS = "answers cannot be constrained at present: no grammar process can be started"
_ONE_RING = struct.pack("Q", 1)


class NoGrammarProcess(Exception):
    """No grammar process can be started, or it ends for a reason that is not the grammar's."""


@dataclass(slots=True, eq=False)
class ForkedProcess:
    """A forked process, and the engine's ends of its links. It stays a zombie until it is reaped."""

    pid: int
    links: list[socket.socket]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def cpu_seconds(self) -> float:
        """Return the exact processor seconds of the process; 0 after its end."""
        clock = (~self.pid << 3) | 2  # as `clock_getcpuclockid` computes it on Linux
        with suppress(OSError):
            return time.clock_gettime(clock)
        return 0.0

    def close(self) -> None:
        for link in self.links:
            link.close()


@dataclass(frozen=True, slots=True)
class Reserve:
    """A fork that can take the forking process's place. It outlives its parent, so that its number may be another's."""

    link: socket.socket
    process: int  # a file descriptor: pidfd_open(2)

    def end(self) -> None:
        """End it with its forks, and close both."""
        self.link.close()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        os.close(self.process)


class MatchingProcess(ForkedProcess):
    """A matching process. One thread asks for steps; any may have grammars compiled, one at a time.

    The process waits for a step at an eventfd, because Linux wakes a socket's reader on the writer's processor, where
    it would interrupt the step whose masks it is to fill.
    """

    def __init__(self, pid: int, links: list[socket.socket], doorbell: int) -> None:
        super().__init__(pid, links)
        self.steps, self._grammars = links
        self.steps.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MASKS_TIMEOUT_SECONDS, 0))
        self._grammars.settimeout(COMPILE_WALL_SECONDS)
        self._doorbell = os.fdopen(doorbell, "wb", buffering=0)  # once it is closed, its number may be another file's
        self._compiling = threading.Lock()

    def ring(self) -> None:
        """Wake the process for the question in shared memory. The answer comes in `MASKS_TIMEOUT_SECONDS`, or an
        `OSError`. Raises `ValueError` once it is closed.
        """
        self._doorbell.write(_ONE_RING)

    def close(self) -> None:
        super().close()
        self._doorbell.close()

    def compile(self, grammar: Grammar) -> None:
        """Have the process compile a valid grammar, beside the masks that steps ask for.

        Raises `GrammarInvalid`, and `EOFError` or `OSError` if the process is gone, or does not answer: it cannot be
        used any more.
        """
        with self._compiling:
            send_frame(self._grammars, grammar.hash + f"{grammar.kind}\n{grammar.source}".encode())
            error = json.loads(receive_frame(self._grammars))
        if error is not None:
            raise GrammarInvalid(error)

    def forget(self, grammar: Grammar) -> None:
        """Have the process forget a grammar. Slots that match it go on with it."""
        with self._compiling:
            try:
                send_frame(self._grammars, grammar.hash)
            except TimeoutError:  # half of the frame may be sent
                self.kill()
            except OSError:
                pass


class SharedMemory:
    """Zeroed memory, shared with the processes that inherit its file, and freed with the last of them."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("sluice-masks")
        os.ftruncate(self.fd, num_bytes)
        self.bytes = mmap.mmap(self.fd, num_bytes)

    def close(self) -> None:
        """Close the file; mapped memory stays as long as it is referred to."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class GrammarProcesses:
    """Owns the grammar processes of one engine; any thread may call its methods, and each blocks.

    Processes are started at the first request for one. A caller that finds a process gone asks for another in its
    place.
    """

    def __init__(self, setup: ProcessSetup) -> None:
        self.setup = setup
        self.num_matching = setup.options.num_processes
        self.num_restarts = 0
        self.mask_time = MaskTime()
        self._memory: SharedMemory | None = None
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._reserve: Reserve | None = None  # a fork of the forking process, which takes its place
        self._successor: Reserve | None = None  # the reserve that has taken it
        self._compiling: set[ForkedProcess] = set()
        self._matching: list[MatchingProcess | None] = [None] * self.num_matching

    def __del__(self) -> None:
        self.end_all()

    @property
    def memory(self) -> SharedMemory:
        """The memory that is shared with the processes."""
        with self._lock:
            if self._memory is None:
                self._memory = SharedMemory(self.setup.layout.num_bytes)
            return self._memory

    def start_forking(self) -> None:
        """Start the forking process, unless it runs. Its reserve takes its place if it has ended: steps do not wait for
        a vocabulary. Raises `GrammarInvalid` if it cannot use the tokenizer, `NoGrammarProcess` if it does not start,
        and `EOFError` or `OSError` if it has ended meanwhile.
        """
        with self._lock:
            if self._link is not None:
                return
            if self._reserve is not None:
                self._successor, self._reserve = self._reserve, None
                self._link = self._successor.link
            else:
                self._start()
            pid, (link,) = self._try_fork({"role": "reserve"}, 1)
            link.settimeout(FORK_TIMEOUT_SECONDS)
            self._reserve = Reserve(link, os.pidfd_open(pid))

    def _start(self) -> None:
        self._link, theirs = socket.socketpair()
        try:
            with theirs:
                fds = (theirs.fileno(), self.memory.fd)
                self._process = subprocess.Popen(  # noqa: S603
                    module_command("backend.structured_output.grammar_process", *fds),
                    env=module_environment(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                )
            self._link.settimeout(START_TIMEOUT_SECONDS)
            send_frame(self._link, json.dumps(asdict(self.setup)).encode())
            error = json.loads(receive_frame(self._link))["error"]
        except BaseException as failure:
            self._end_all()
            if not isinstance(failure, EOFError | OSError):
                raise
            why = str(failure) or "it ends, and has written why"
            raise NoGrammarProcess(f"{NONE_STARTS} ({why})") from failure
        if error is not None:
            self._end_all()
            raise GrammarInvalid(f"answers of this model cannot be constrained: {error}")
        self._link.settimeout(FORK_TIMEOUT_SECONDS)

    def end_all(self) -> None:
        """End all processes, matching and compiling."""
        with self._lock:
            self._end_all()
            if self._reserve is not None:
                self._reserve.end()
                self._reserve = None
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def index_of(self, grammar: Grammar) -> int:
        """Return the index of the process that matches a grammar: an owner's grammars all have the same."""
        return zlib.crc32(grammar.owner.encode("utf-8", "surrogatepass")) % self.num_matching

    def matching(self, index: int) -> MatchingProcess:
        """Return the matching process of this index, which may have ended unnoticed."""
        with self._lock:
            process = self._matching[index]
            if process is None:
                doorbell = os.eventfd(0)
                try:
                    pid, links = self._fork({"role": "match", "index": index}, 2, doorbell)
                except BaseException:
                    os.close(doorbell)
                    raise
                process = self._matching[index] = MatchingProcess(pid, links, doorbell)
            return process

    def has(self, process: MatchingProcess) -> bool:
        """Return True unless the process is known to have ended."""
        return process in self._matching

    def discard(self, process: MatchingProcess) -> int | None:
        """Kill a process that is gone or of no use; a successor is started when it is needed. Returns the status as
        `end` does; None also if the process was known to be gone.
        """
        with self._lock:
            if process not in self._matching:
                return None
            self.num_restarts += 1
            self._matching[self._matching.index(process)] = None
            return self.end(process)

    def fork_compiler(self) -> ForkedProcess:
        """Return a new process that compiles one grammar after the other."""
        with self._lock:
            process = ForkedProcess(*self._fork({"role": "compile"}, 1))
            self._compiling.add(process)
            return process

    def end(self, process: ForkedProcess) -> int | None:
        """Kill a process if it still runs, close its links, and return its status as `os.waitpid` does; None if the
        forking process is gone, which reaps it.
        """
        process.kill()
        process.close()
        with self._lock:
            self._compiling.discard(process)
            try:
                status: int | None = self._ask({"reap": process.pid}, [])
            except (EOFError, OSError):
                return None
            return status

    def _fork(self, command: dict[str, Any], num_links: int, *fds: int) -> tuple[int, list[socket.socket]]:
        """Fork a process; if the forking process is gone, with all its forks, by its reserve or a newly started one."""
        for _ in range(3):
            try:
                self.start_forking()
                return self._try_fork(command, num_links, *fds)
            except (EOFError, OSError):
                log.exception("the process that forks grammar processes is gone")
        raise NoGrammarProcess(NONE_STARTS)

    def _try_fork(self, command: dict[str, Any], num_links: int, *fds: int) -> tuple[int, list[socket.socket]]:
        """Fork a process. Raises `EOFError` or `OSError` if the forking process is gone."""
        pairs = [socket.socketpair() for _ in range(num_links)]
        try:
            pid: int = self._ask(command, [*(theirs.fileno() for _, theirs in pairs), *fds])
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        return pid, [ours for ours, _ in pairs]

    def _ask(self, command: dict[str, Any], fds: list[int]) -> Any:
        """Ask the forking process. Any interruption ends it: a late answer would be taken for the answer to the next
        question.
        """
        if self._link is None:
            raise EOFError
        try:
            socket.send_fds(self._link, [json.dumps(command).encode()], fds)
            return json.loads(receive_frame(self._link))
        except BaseException:
            self._end_all()
            raise

    def _end_all(self) -> None:
        """End the forking process, with all its forks."""
        matching, self._matching = self._matching, [None] * self.num_matching
        for process in [*filter(None, matching), *self._compiling]:
            process.close()
        self._compiling.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._successor is not None:
            self._successor.end()
            self._successor = None
