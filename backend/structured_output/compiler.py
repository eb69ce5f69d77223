"""Has grammars compiled before their sequences are queued, within each owner's bounds.

A new grammar is compiled in a process that is killed when it takes too long, and then once more in the process that
will match it: a compiled grammar cannot leave its process. Each owner compiles one at a time, its keys in turns, and
its compiled grammars are cached for it alone, up to a number of bytes: the latency of an answer does not reveal other
owners' grammars.
"""

import asyncio
import json
import logging
import os
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from backend.errors import GrammarInvalid, GrammarTooComplex
from backend.grammar import Grammar
from backend.structured_output.frames import receive_frame, send_frame
from backend.structured_output.processes import ForkedProcess, GrammarProcesses, MatchingProcess, NoGrammarProcess

log = logging.getLogger(__name__)

MAX_WAITING_PER_KEY = 32  # grammars behind the one that is compiled
KEY_SHARE = 0.5  # of its owner's bound, which one key's grammars may take even while other keys use theirs
WALL_SECONDS = 20.0  # after which compiling is given up, however little time of a processor it was given
NO_ANSWER = "answers cannot be constrained at present: grammar processes do not answer"


class TooManyGrammars(Exception):
    """The key has too many grammars waiting to be compiled, or in use."""


@dataclass(slots=True)
class CompiledGrammar:
    """A grammar that was compiled, and for whom."""

    grammar: Grammar
    num_bytes: int
    seconds: float  # of a processor, that compiling it took
    process: MatchingProcess  # that has it
    users: Counter[str] = field(default_factory=Counter)  # by key, those queued or running that need it

    @property
    def num_users(self) -> int:
        return self.users.total()

    @property
    def owner(self) -> str:
        return self.grammar.owner


class _Job:
    """Compiling one grammar, on a thread that waits for the processes. It may be given up at any time."""

    def __init__(self, grammar: Grammar, processes: GrammarProcesses, spare: list[ForkedProcess]) -> None:
        """`spare` are processes that compile, and wait for a grammar."""
        self._grammar, self._processes, self._spare = grammar, processes, spare
        self.lost_seconds = 0.0  # of a processor, that processes had taken which ended without an answer
        self._process: ForkedProcess | None = None  # that compiles
        self._is_cancelled = False

    def cancel(self) -> None:
        """Give it up: who compiles is killed, and nobody waits for what comes of it."""
        self._is_cancelled = True
        if self._process is not None:
            self._process.kill()

    def run(self) -> CompiledGrammar:
        """Raises `GrammarInvalid`, as `GrammarTooComplex` where it takes too long or too much memory, and
        `NoGrammarProcess`.
        """
        seconds, num_bytes = self._try()
        index, limit = self._processes.index_of(self._grammar), None
        for _ in range(2):
            process = self._processes.matching(index)
            try:
                process.compile(self._grammar)
                return CompiledGrammar(self._grammar, num_bytes, 2 * seconds, process)
            except (EOFError, OSError):
                limit = self._limit_of(self._processes.lost(process))
        if limit is None:
            raise NoGrammarProcess(NO_ANSWER)
        raise GrammarTooComplex("the grammar takes more memory than there is for it; simplify it")

    def _try(self) -> tuple[float, int]:
        """Compile it where that may fail in any way; returns the seconds of a processor and the bytes that it took.

        A process that ends for another reason than its limits says nothing of the grammar: another one is asked, once.
        """
        for _ in range(2):
            process = self._process = self._spare.pop() if self._spare else self._processes.fork_compiler()
            had = process.cpu_seconds()
            if self._is_cancelled:
                process.kill()
            answer: dict[str, Any] | None = None
            try:
                answer = self._ask(process)
            except TimeoutError:
                break  # it was given no time: with it, it would have been answered or killed
            except (EOFError, OSError):
                self.lost_seconds += max(0.0, process.cpu_seconds() - had)
            finally:
                self._process = None
                if answer is None:
                    status = self._processes.end(process)
            if answer is not None:
                self._spare.append(process)
                return _cost(answer)
            if (limit := self._limit_of(status)) is not None:
                raise GrammarTooComplex(
                    f"the grammar takes more than {limit} to compile, which is the most that it may; simplify it"
                )
            if self._is_cancelled:
                break
        raise NoGrammarProcess(NO_ANSWER)

    def _ask(self, process: ForkedProcess) -> dict[str, Any]:
        """Raises `TimeoutError` where the process gets no time."""
        link = process.links[0]
        link.settimeout(WALL_SECONDS)
        send_frame(link, f"{self._grammar.kind}\n{self._grammar.source}".encode("utf-8", "surrogatepass"))
        answer: dict[str, Any] = json.loads(receive_frame(link))
        return answer

    def _limit_of(self, status: int | None) -> str | None:
        """Return the limit that ended a process with this status; None where it was none."""
        options = self._processes.setup.options
        if status in (None, 0, signal.SIGKILL):  # its link was closed, or somebody has killed it
            return None
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return f"{1000 * options.compile_seconds:g} ms of a processor"
        return f"{options.compile_bytes / 2**20:.0f} MiB of memory"


def _cost(answer: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds of a processor and the bytes that a grammar took. Raises `GrammarInvalid` for what is none."""
    if answer["error"] is not None:
        raise (GrammarTooComplex if answer["is_too_complex"] else GrammarInvalid)(answer["error"])
    return answer["seconds"], answer["num_bytes"]


def _log_failure(start: "Future[Any]") -> None:
    if not start.cancelled() and (error := start.exception()) is not None:
        log.error("no answer can have a grammar: %s", error)


class GrammarCompiler:
    """Keeps what was compiled. Its methods are called by one thread, which is never held up but by `compile_now`."""

    def __init__(self, processes: GrammarProcesses, owner_bytes: int = 64 << 20, num_compiling: int = 1) -> None:
        """`owner_bytes` is what compiled grammars of one owner may take, and beyond it those of a key that uses no more
        than `KEY_SHARE` of it; `num_compiling` are compiled at a time.
        """
        self.processes = processes
        self.owner_bytes = owner_bytes
        self.num_hits = self.num_misses = self.num_invalid = self.num_too_complex = 0
        self.seconds = 0.0  # of processors, that compiling has taken
        self.on_compiled: list[Callable[[str, float], object]] = []  # with the owner, and seconds of a processor
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # by hash, the last used last
        self._bytes: dict[str, int] = {}  # by owner, of what is compiled
        self._used = Counter[tuple[str, str]]()  # by owner and key, bytes of what its requests need
        self._turns: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()  # by owner, and by key
        self._waiting = Counter[tuple[str, str]]()  # by owner and key
        self._spare: list[ForkedProcess] = []  # that compile, and wait for a grammar
        self._threads = ThreadPoolExecutor(num_compiling, thread_name_prefix="grammar")

    def start(self) -> None:
        """Have the processes start that the first grammar needs, which takes seconds where the vocabulary is large.

        A failure is logged, and told to every request that asks for a grammar.
        """
        self._threads.submit(self.processes.matching, 0).add_done_callback(_log_failure)

    async def acquire(self, grammar: Grammar, key: str = "") -> CompiledGrammar:
        """Return a grammar that was compiled, and stays so until it is released. What only waits may be cancelled.

        Raises `GrammarInvalid`, and `TooManyGrammars` or `NoGrammarProcess` for what may be tried again later.
        """
        if (found := self._find(grammar)) is not None:
            return self._use(found, key)
        whose = grammar.owner, key
        if self._waiting[whose] > MAX_WAITING_PER_KEY:
            raise TooManyGrammars(f"{MAX_WAITING_PER_KEY} grammars wait to be compiled, which is the most that may")
        self._waiting[whose] += 1
        try:
            # a key has one of its grammars wait for its owner's turn, so that its owner's keys take turns
            async with self._turn(*whose), self._turn(grammar.owner):
                found = self._find(grammar)
                return self._use(found if found is not None else await self._compile(grammar, key), key)
        finally:
            self._waiting[whose] -= 1
            if not self._waiting[whose]:
                del self._waiting[whose]

    def _turn(self, *whose: str) -> asyncio.Lock:
        return self._turns.setdefault(whose, asyncio.Lock())

    def compile_now(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar as `acquire` does, once it is compiled; meanwhile the caller waits."""
        found = self._find(grammar)
        if found is None:
            job = _Job(grammar, self.processes, self._spare)
            try:
                found = self._threads.submit(job.run).result()
            except GrammarInvalid as error:
                self._count(error)
                raise
            found = self._keep(found, "")
        return self._use(found, "")

    def release(self, compiled: CompiledGrammar, key: str = "") -> None:
        """Take note that one that has acquired a grammar has no use for it any more."""
        self._unuse(compiled, key)
        self._trim(compiled.owner)

    def release_all(self, several: Iterable[CompiledGrammar]) -> None:
        for compiled in several:
            self.release(compiled)

    def close(self) -> None:
        """End the processes, and the threads that wait for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.processes.stop()

    def _use(self, compiled: CompiledGrammar, key: str) -> CompiledGrammar:
        if not compiled.users[key]:
            self._used[compiled.owner, key] += compiled.num_bytes
        compiled.users[key] += 1
        return compiled

    def _unuse(self, compiled: CompiledGrammar, key: str) -> None:
        compiled.users[key] -= 1
        if not compiled.users[key]:
            del compiled.users[key]
            self._used[compiled.owner, key] -= compiled.num_bytes
            if not self._used[compiled.owner, key]:
                del self._used[compiled.owner, key]

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return what is compiled of it, unless the process that had it is gone."""
        found = self._compiled.get(grammar.hash)
        if found is not None and self.processes.has(found.process):
            self._compiled.move_to_end(grammar.hash)
            self.num_hits += 1
            return found
        return None

    async def _compile(self, grammar: Grammar, key: str) -> CompiledGrammar:
        job, loop = _Job(grammar, self.processes, self._spare), asyncio.get_running_loop()

        def ended(work: Future[CompiledGrammar]) -> None:
            with suppress(RuntimeError):  # the loop is closed by now
                loop.call_soon_threadsafe(self._given_up, job, grammar.owner, key, work)

        work = self._threads.submit(job.run)
        try:
            compiled = await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            job.cancel()
            work.add_done_callback(ended)
            raise
        except GrammarInvalid as error:
            self._failed(grammar.owner, error)
            raise
        return self._keep(compiled, key)

    def _given_up(self, job: _Job, owner: str, key: str, work: Future[CompiledGrammar]) -> None:
        """Charge what was spent on a grammar that its owner has given up, and keep it if it was done all the same."""
        if work.cancelled():
            return  # it had not begun
        error = work.exception()
        if error is None:
            with suppress(TooManyGrammars):
                self._keep(work.result(), key)
        elif isinstance(error, GrammarInvalid):
            self._failed(owner, error)
        else:
            self._charge(owner, job.lost_seconds)

    def _failed(self, owner: str, error: GrammarInvalid) -> None:
        self._count(error)
        if isinstance(error, GrammarTooComplex):
            self._charge(owner, self.processes.setup.options.compile_seconds)

    def _count(self, error: GrammarInvalid) -> None:
        self.num_too_complex += isinstance(error, GrammarTooComplex)
        self.num_invalid += not isinstance(error, GrammarTooComplex)

    def _charge(self, owner: str, seconds: float) -> None:
        self.seconds += seconds
        for tell in self.on_compiled:
            tell(owner, seconds)

    def _keep(self, compiled: CompiledGrammar, key: str) -> CompiledGrammar:
        """Keep what was compiled, at the cost of what its owner has not used for longest."""
        owner, name = compiled.owner, compiled.grammar.hash
        self.num_misses += 1
        self._charge(owner, compiled.seconds)
        if (before := self._compiled.get(name)) is not None:
            before.process = compiled.process
            return before
        self._bytes[owner] = self._bytes.get(owner, 0) + compiled.num_bytes
        self._compiled[name] = compiled
        self._use(compiled, key)  # it is not given up for itself
        self._trim(owner)
        used = self._used[owner, key]
        self._unuse(compiled, key)
        if self._bytes.get(owner, 0) > self.owner_bytes and used > KEY_SHARE * self.owner_bytes:
            self._forget(compiled)
            raise TooManyGrammars(
                f"the compiled grammars of what runs and waits take more than {self.owner_bytes:,} bytes; use fewer "
                "different ones at a time"
            )
        return compiled

    def _trim(self, owner: str) -> None:
        if self._bytes.get(owner, 0) <= self.owner_bytes:
            return
        for compiled in [one for one in self._compiled.values() if one.owner == owner and not one.num_users]:
            self._forget(compiled)
            if self._bytes.get(owner, 0) <= self.owner_bytes:
                return

    def _forget(self, compiled: CompiledGrammar) -> None:
        owner = compiled.owner
        if self._compiled.pop(compiled.grammar.hash, None) is not None:
            self._bytes[owner] -= compiled.num_bytes
            if not self._bytes[owner]:
                del self._bytes[owner]
        with suppress(RuntimeError):  # it is closed
            self._threads.submit(compiled.process.forget, compiled.grammar)
