"""Compiles grammars before their sequences are queued, within the bounds of each owner.

A new grammar is compiled in a process that is killed when it takes too long, and then again in the process that will
match it, because a compiled grammar cannot leave its process. Each owner compiles one grammar at a time, its keys in
turns. Its compiled grammars are cached for it alone, up to a number of bytes, so that the latency of an answer does not
reveal the grammars of other owners.
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

MAX_WAITING_PER_KEY = 32  # grammars of one key behind the grammar that is compiled
KEY_SHARE = 0.5  # the share of its owner's bytes that one key's grammars may take even while other keys use theirs
COMPILE_WALL_SECONDS = 20.0  # of wall clock; compiling is then given up, however little processor time it was given
PROCESSES_SILENT = "answers cannot be constrained at present: grammar processes do not answer"


class TooManyGrammars(Exception):
    """The key has too many grammars waiting to be compiled, or in use."""


@dataclass(slots=True)
class CompiledGrammar:
    """A compiled grammar, and the keys that use it."""

    grammar: Grammar
    num_bytes: int
    seconds: float  # processor seconds that compiling took
    process: MatchingProcess  # the process that has it
    # by key, its queued and running requests that need the grammar
    users: Counter[str] = field(default_factory=Counter)

    @property
    def num_users(self) -> int:
        return self.users.total()

    @property
    def owner(self) -> str:
        return self.grammar.owner


class _Compilation:
    """One grammar's compilation, on a thread that waits for the processes. It may be cancelled at any time."""

    def __init__(self, grammar: Grammar, processes: GrammarProcesses, spare: list[ForkedProcess]) -> None:
        """`spare` are idle compiling processes."""
        self._grammar, self._processes, self._spare = grammar, processes, spare
        self.lost_seconds = 0.0  # processor seconds of processes that ended without an answer
        self._process: ForkedProcess | None = None  # the compiling process
        self._is_cancelled = False

    def cancel(self) -> None:
        """Give the compilation up: the compiling process is killed, and its result is dropped."""
        self._is_cancelled = True
        if self._process is not None:
            self._process.kill()

    def run(self) -> CompiledGrammar:
        """Compile the grammar. Raises `GrammarInvalid`, as `GrammarTooComplex` where it takes too much time or memory,
        and `NoGrammarProcess`.
        """
        seconds, num_bytes = self._try()
        index, limit = self._processes.index_of(self._grammar), None
        for _ in range(2):
            process = self._processes.matching(index)
            try:
                process.compile(self._grammar)
                return CompiledGrammar(self._grammar, num_bytes, 2 * seconds, process)
            except (EOFError, OSError):
                limit = self._limit_of(self._processes.discard(process))
        if limit is None:
            raise NoGrammarProcess(PROCESSES_SILENT)
        raise GrammarTooComplex("the grammar takes more memory than there is for it; simplify it")

    def _try(self) -> tuple[float, int]:
        """Compile the grammar in a process that may fail; returns the processor seconds and the bytes that it took.

        A process that ends for another reason than its limits says nothing about the grammar: a second process is
        asked, once.
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
                break  # it got no processor time: with it, the process would have answered or been killed
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
        raise NoGrammarProcess(PROCESSES_SILENT)

    def _ask(self, process: ForkedProcess) -> dict[str, Any]:
        """Send the grammar and return the answer. Raises `TimeoutError` if the process gets no processor time."""
        link = process.links[0]
        link.settimeout(COMPILE_WALL_SECONDS)
        send_frame(link, f"{self._grammar.kind}\n{self._grammar.source}".encode("utf-8", "surrogatepass"))
        answer: dict[str, Any] = json.loads(receive_frame(link))
        return answer

    def _limit_of(self, status: int | None) -> str | None:
        """Return the limit that ended a process with this status; None if no limit did."""
        options = self._processes.setup.options
        if status in (None, 0, signal.SIGKILL):  # its link was closed, or another program killed it
            return None
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return f"{1000 * options.compile_seconds:g} ms of a processor"
        return f"{options.compile_bytes / 2**20:.0f} MiB of memory"


def _cost(answer: dict[str, Any]) -> tuple[float, int]:
    """Return the processor seconds and the bytes that a grammar took. Raises `GrammarInvalid`."""
    if answer["error"] is not None:
        raise (GrammarTooComplex if answer["is_too_complex"] else GrammarInvalid)(answer["error"])
    return answer["seconds"], answer["num_bytes"]


def _log_failure(start: "Future[Any]") -> None:
    if not start.cancelled() and (error := start.exception()) is not None:
        log.error("no answer can have a grammar: %s", error)


class GrammarCompiler:
    """Compiled grammars by owner. One thread calls its methods, none of which blocks but `compile_now`."""

    def __init__(self, processes: GrammarProcesses, owner_bytes: int = 64 << 20) -> None:
        """`owner_bytes` bounds the compiled grammars of one owner; a key that uses at most `KEY_SHARE` of them may
        exceed it. One grammar is compiled at a time.
        """
        self.processes = processes
        self.owner_bytes = owner_bytes
        self.num_hits = self.num_misses = self.num_invalid = self.num_too_complex = 0
        self.seconds = 0.0  # processor seconds that compiling has taken
        self.on_compiled: list[Callable[[str, float], object]] = []  # called with the owner and the processor seconds
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # by hash, the last used last
        self._bytes: dict[str, int] = {}  # by owner, of its compiled grammars
        self._used = Counter[tuple[str, str]]()  # by owner and key, bytes of the grammars that its requests use
        self._turns: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()  # by owner, and by key
        self._waiting = Counter[tuple[str, str]]()  # by owner and key
        self._spare: list[ForkedProcess] = []  # idle compiling processes
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # owns the spare processes

    def prepare(self) -> None:
        """Start the processes that the first grammar needs, which takes seconds if the vocabulary is large.

        A failure is logged, and told to every request that asks for a grammar.
        """
        self._threads.submit(self.processes.matching, 0).add_done_callback(_log_failure)

    async def acquire(self, grammar: Grammar, key: str = "") -> CompiledGrammar:
        """Return the compiled grammar, which stays compiled until it is released. A caller that waits may be cancelled.

        Raises `GrammarInvalid`, and `TooManyGrammars` or `NoGrammarProcess` where a later try may succeed.
        """
        if (found := self._find(grammar)) is not None:
            return self._use(found, key)
        whose = grammar.owner, key
        if self._waiting[whose] > MAX_WAITING_PER_KEY:
            raise TooManyGrammars(f"{MAX_WAITING_PER_KEY} grammars wait to be compiled, which is the most that may")
        self._waiting[whose] += 1
        try:
            # one grammar of each key waits for the owner's turn, so that the owner's keys take turns
            async with self._turn(grammar.owner, key), self._turn(grammar.owner):
                found = self._find(grammar)
                return self._use(found if found is not None else await self._compile(grammar, key), key)
        finally:
            self._waiting[whose] -= 1
            if not self._waiting[whose]:
                del self._waiting[whose]

    def _turn(self, *whose: str) -> asyncio.Lock:
        return self._turns.setdefault(whose, asyncio.Lock())

    def compile_now(self, grammar: Grammar) -> CompiledGrammar:
        """Return a grammar as `acquire` does; the calling thread blocks until it is compiled."""
        found = self._find(grammar)
        if found is None:
            job = _Compilation(grammar, self.processes, self._spare)
            try:
                found = self._threads.submit(job.run).result()
            except GrammarInvalid as error:
                self._count(error)
                raise
            found = self._keep(found, "")
        return self._use(found, "")

    def release(self, compiled: CompiledGrammar, key: str = "") -> None:
        """Release one use of an acquired grammar."""
        self._unuse(compiled, key)
        self._trim(compiled.owner)

    def release_all(self, several: Iterable[CompiledGrammar]) -> None:
        for compiled in several:
            self.release(compiled)

    def close(self) -> None:
        """End the processes, and the threads that wait for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.processes.end_all()

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
        """Return the compiled grammar, unless its process has ended."""
        found = self._compiled.get(grammar.hash)
        if found is not None and self.processes.has(found.process):
            self._compiled.move_to_end(grammar.hash)
            self.num_hits += 1
            return found
        return None

    async def _compile(self, grammar: Grammar, key: str) -> CompiledGrammar:
        job, loop = _Compilation(grammar, self.processes, self._spare), asyncio.get_running_loop()

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

    def _given_up(self, job: _Compilation, owner: str, key: str, work: Future[CompiledGrammar]) -> None:
        """Charge the owner for a compilation that it gave up, and keep the grammar if it was compiled all the same."""
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
        """Keep a compiled grammar, and forget its owner's least recently used ones."""
        owner, name = compiled.owner, compiled.grammar.hash
        self.num_misses += 1
        self._charge(owner, compiled.seconds)
        if (before := self._compiled.get(name)) is not None:
            before.process = compiled.process
            return before
        self._bytes[owner] = self._bytes.get(owner, 0) + compiled.num_bytes
        self._compiled[name] = compiled
        self._use(compiled, key)  # so that it is not forgotten for itself
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
        with suppress(RuntimeError):  # the executor is closed
            self._threads.submit(compiled.process.forget, compiled.grammar)
