"""A grammar process: started by `GrammarProcesses`, it holds the vocabulary as llguidance has it, and forks others.

Making that takes seconds for a large vocabulary, a fork some milliseconds: so those that compile what nobody has seen
yet, and those that match, can be killed at any time. The process itself only forks, and ends with its link; the others
end with it.
"""

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from backend.grammar import GrammarKind
from backend.structured_output.compile import CompileError, compile_grammar, make_tokenizer
from backend.structured_output.frames import KEY_INTS, Op, RowStatus, receive_frame, send_frame
from backend.structured_output.matching import SlotMatcher
from backend.structured_output.process_setup import ProcessSetup, StructuredOutputOptions

NICE = 10  # of a process that compiles: on a busy machine those that generate go first, and it still goes on
TICK = 0.01  # seconds in which the clock of a process may stand still
_PR_SET_PDEATHSIG = 1
_KEY_BYTES = 4 * KEY_INTS


def main() -> None:
    """Fork processes until the engine's process closes the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    link, shared_fd = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    said = json.loads(receive_frame(link))
    setup = ProcessSetup(**{**said, "options": StructuredOutputOptions(**said["options"])})
    try:
        text = Path(setup.tokenizer_path).read_text(encoding="utf-8")
        tokenizer = make_tokenizer(text, setup.vocab_size, setup.end_tokens)
    except (OSError, ValueError) as error:
        send_frame(link, json.dumps({"error": str(error)}).encode())
        return
    shared = mmap.mmap(shared_fd, 0)
    gc.freeze()
    send_frame(link, json.dumps({"error": None}).encode())
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(link, 256, 2)
        except OSError:
            return
        if not message:
            return
        command: dict[str, Any] = json.loads(message)
        if "reap" in command:
            _, status = os.waitpid(command["reap"], 0)
            send_frame(link, json.dumps(status).encode())
        else:
            _fork(link, command, [socket.socket(fileno=fd) for fd in fds], setup, tokenizer, shared)


def _fork(
    link: socket.socket,
    command: dict[str, Any],
    links: list[socket.socket],
    setup: ProcessSetup,
    tokenizer: LLTokenizer,
    shared: mmap.mmap,
) -> None:
    pid = os.fork()
    if pid:
        for one in links:
            one.close()
        send_frame(link, json.dumps(pid).encode())
        return
    status = 1
    try:
        link.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if command["role"] == "compile":
            _compile_for(links[0], setup, tokenizer)
        else:
            _limit_memory(setup.options.match_bytes)
            _Matching(setup, tokenizer, shared, command["index"]).run(*links)
        status = 0
    except (EOFError, OSError):
        status = 0  # the engine has no use for it any more
    except MemoryError:
        status = 1
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        os._exit(status)


def _limit_memory(num_bytes: int) -> None:
    """Have the process end when it takes so much more than it has now."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = 1024 * int(sizes["VmData"].split()[0]) + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class _HeapUse(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _heap_bytes() -> int:
    """Return the bytes that the process has allocated, which is exact where the C library is glibc, and else 0."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _HeapUse
    use = libc.mallinfo2()
    return int(use.uordblks + use.hblkhd)


def _compile_for(link: socket.socket, setup: ProcessSetup, tokenizer: LLTokenizer) -> None:
    """Compile one grammar after the other, to say whether and at what cost. The process is killed where one takes more
    than it may; that it took much memory is answered as the last thing.
    """
    os.nice(NICE)
    _limit_memory(setup.options.compile_bytes)
    mask = ctypes.create_string_buffer(4 * setup.num_words)
    while True:
        kind, source = receive_frame(link).decode("utf-8").split("\n", 1)
        before, error, is_too_complex, matcher = _heap_bytes(), None, False, None
        began, began_at = time.process_time(), time.perf_counter()
        signal.setitimer(signal.ITIMER_PROF, setup.options.compile_seconds)
        try:
            matcher = compile_grammar(tokenizer, GrammarKind(kind), source)
            first = SlotMatcher(matcher).fill(ctypes.addressof(mask), 4 * setup.num_words)
            if first is not RowStatus.MASKED:
                error = "no token can begin what it matches, or it takes too long to say which"
        except CompileError as invalid:
            error, is_too_complex = str(invalid), invalid.is_too_complex
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds, num_bytes = time.process_time() - began, max(0, _heap_bytes() - before)
        seconds = seconds or min(time.perf_counter() - began_at, TICK)
        del matcher
        answer = {
            "error": error,
            "is_too_complex": is_too_complex,
            "seconds": seconds,
            "num_bytes": num_bytes + len(source),
        }
        send_frame(link, json.dumps(answer).encode())


class _Matching:
    """A process that matches: one thread answers steps, another compiles what was found fit for it.

    Compiling gives the interpreter free, so that steps are answered meanwhile.
    """

    def __init__(self, setup: ProcessSetup, tokenizer: LLTokenizer, shared: mmap.mmap, index: int) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[bytes, LLMatcher] = {}
        self._matchers: dict[int, SlotMatcher | None] = {}  # by slot; None: its grammar is unknown
        self._num_words = setup.num_words
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self._words = memoryview(shared).cast("i")
        self._bits = memoryview(shared).cast("B")
        self._working_on = setup.max_num_seqs * setup.num_words + index
        self._none = bytes(4 * setup.num_words)
        self._all = b"\xff" * (4 * setup.num_words)

    def run(self, steps: socket.socket, grammars: socket.socket) -> None:
        """Serve until a link ends."""
        # the engine goes on with its step while this process fills masks; else it would be interrupted by waking it: 32
        # rows cost it 0.2 ms a step to ask for, and not 1
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        threading.Thread(target=self._serve_grammars, args=(grammars,), daemon=True).start()
        while True:
            asked = array("i", receive_frame(steps))
            send_frame(steps, self._step(asked).tobytes())

    def _serve_grammars(self, link: socket.socket) -> None:
        """Compile and forget: a frame is a key, and the kind and the source of what is to be compiled, if anything."""
        try:
            while True:
                frame = receive_frame(link)
                key, error = frame[:_KEY_BYTES], None
                if len(frame) == _KEY_BYTES:
                    self._compiled.pop(key, None)
                    continue
                kind, source = frame[_KEY_BYTES:].decode("utf-8").split("\n", 1)
                try:
                    self._compiled[key] = compile_grammar(self._tokenizer, GrammarKind(kind), source)
                except CompileError as invalid:
                    error = str(invalid)
                send_frame(link, json.dumps(error).encode())
        except (EOFError, OSError):
            os._exit(0)

    def _step(self, asked: "array[int]") -> "array[int]":
        """Serve what a step asks for; see `frames`."""
        began, answer, place = time.perf_counter_ns(), array("i", asked[:1]), 1
        while place < len(asked):
            op, slot = asked[place], asked[place + 1]
            place += 2
            if op == Op.ADMIT:
                count = asked[place + KEY_INTS]
                compiled = self._compiled.get(asked[place : place + KEY_INTS].tobytes())
                self._words[self._working_on] = slot
                self._matchers[slot] = None if compiled is None else SlotMatcher(compiled)
                place += KEY_INTS + 1
                self._output_is(slot, 0, asked[place : place + count])
            else:
                start, count = asked[place], asked[place + 1]
                place += 2
                self._words[self._working_on] = slot
                self._output_is(slot, start, asked[place : place + count])
                answer.extend(self._fill(slot))
            place += count
        self._words[self._working_on] = -1
        answer.append(min((time.perf_counter_ns() - began) // 1000, 2**31 - 1))
        return answer

    def _output_is(self, slot: int, start: int, tokens: "array[int]") -> None:
        matcher = self._matchers.get(slot)
        if matcher is not None and tokens:
            matcher.output_is(start, tokens)

    def _fill(self, slot: int) -> list[int]:
        matcher = self._matchers.get(slot)
        if matcher is None:
            return [RowStatus.UNKNOWN, 0]
        begin, size = 4 * slot * self._num_words, 4 * self._num_words
        status = matcher.fill(self._address + begin, size)
        if status is not RowStatus.MASKED:
            self._bits[begin : begin + size] = self._all
            return [status, 0]
        if forced := matcher.forced:
            self._bits[begin : begin + size] = self._none
            self._bits[begin + forced[0] // 8] = 1 << forced[0] % 8
        return [status, len(forced), *forced]


if __name__ == "__main__":
    main()
