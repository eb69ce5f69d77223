"""A grammar process holds the vocabulary in llguidance's format and forks compiling and matching processes.

`GrammarProcesses` starts it. Loading a large vocabulary takes seconds and a fork some milliseconds, so any fork can be
killed at any time. This process only forks, and ends with its link; its forks end with it, but for its reserve, which
takes its place.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from backend.grammar import GrammarKind
from backend.structured_output.compile import CompileError, compile_grammar, make_tokenizer
from backend.structured_output.frames import (
    HEAD_INTS,
    KEY_INTS,
    NEW_SLOT_INTS,
    ROW_INTS,
    RowStatus,
    StepAnswer,
    receive_frame,
    send_answer,
    send_frame,
)
from backend.structured_output.matching import SlotMatcher
from backend.structured_output.process_setup import MAX_FORCED_TOKENS, ProcessSetup, StructuredOutputOptions

COMPILE_NICENESS = 10  # of a compiling process: it gives way to generation, and still goes on
CLOCK_TICK_SECONDS = 0.01  # the longest that the clock of a process may stand still
_PR_SET_PDEATHSIG = 1
_KEY_BYTES = 4 * KEY_INTS


def main() -> None:
    """Fork processes until the engine's process closes the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process
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
    _serve_forks(link, setup, tokenizer, shared)


def _serve_forks(link: socket.socket, setup: ProcessSetup, tokenizer: LLTokenizer, shared: mmap.mmap) -> None:
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(link, 256, 3)
        except OSError:
            return
        if not message:
            return
        command: dict[str, Any] = json.loads(message)
        if "reap" in command:
            status = None
            with suppress(ChildProcessError):  # the parent of this process was killed, and this process with it
                _, status = os.waitpid(command["reap"], 0)
            send_frame(link, json.dumps(status).encode())
        else:
            _fork(link, command, fds, setup, tokenizer, shared)


def _fork(
    link: socket.socket,
    command: dict[str, Any],
    fds: list[int],
    setup: ProcessSetup,
    tokenizer: LLTokenizer,
    shared: mmap.mmap,
) -> None:
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        send_frame(link, json.dumps(pid).encode())
        return
    # open to the end: the engine may kill a process whose links close
    status, links = 1, [socket.socket(fileno=fd) for fd in fds[:2]]
    try:
        link.close()
        if command["role"] == "reserve":
            _serve_forks(links[0], setup, tokenizer, shared)
            return
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if command["role"] == "compile":
            _compile_for(links[0], setup, tokenizer)
        else:
            _limit_memory(setup.options.match_bytes)
            _MatchingServer(setup, tokenizer, shared, command["index"]).run(links[0], links[1], fds[2])
        status = 0
    except (EOFError, OSError):
        status = 0  # the engine has no use for this process any more
    except MemoryError:
        status = 1
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        os._exit(status)


def _limit_memory(num_bytes: int) -> None:
    """Have the process end when it takes `num_bytes` more memory than now."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = 1024 * int(sizes["VmData"].split()[0]) + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class _HeapUse(ctypes.Structure):
    """The `struct mallinfo2` of glibc: the allocated bytes of a process."""

    _names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def _heap_bytes() -> int:
    """Return the allocated bytes of the process, exactly if the C library is glibc, and 0 otherwise."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _HeapUse
    use = libc.mallinfo2()
    return int(use.uordblks + use.hblkhd)


def _compile_for(link: socket.socket, setup: ProcessSetup, tokenizer: LLTokenizer) -> None:
    """Compile grammars one after the other, and answer each with its cost or its error. The engine kills the process if
    a grammar takes too much.
    """
    os.nice(COMPILE_NICENESS)
    _use_free_processors()
    _limit_memory(setup.options.compile_bytes)
    mask = ctypes.create_string_buffer(4 * setup.layout.num_words)
    while True:
        frame = receive_frame(link)
        before, error, is_too_complex, matcher = _heap_bytes(), None, False, None
        began, began_at = time.process_time(), time.perf_counter()
        signal.setitimer(signal.ITIMER_PROF, setup.options.compile_seconds)
        try:
            kind, source = frame.decode("utf-8").split("\n", 1)
            matcher = compile_grammar(tokenizer, GrammarKind(kind), source)
            first = SlotMatcher(matcher).fill(ctypes.addressof(mask), len(mask))
            if first is not RowStatus.MASKED:
                error = "no token can begin what it matches, or it takes too long to say which"
        except CompileError as invalid:
            error, is_too_complex = str(invalid), invalid.is_too_complex
        except ValueError as invalid:  # no Unicode, or no JSON
            error = str(invalid)
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds, num_bytes = time.process_time() - began, max(0, _heap_bytes() - before)
        seconds = seconds or min(time.perf_counter() - began_at, CLOCK_TICK_SECONDS)
        del matcher
        answer = {
            "error": error,
            "is_too_complex": is_too_complex,
            "seconds": seconds,
            "num_bytes": num_bytes + len(frame),
        }
        send_frame(link, json.dumps(answer).encode())


def _use_free_processors() -> None:
    """Have the process wait for a free processor instead of interrupting the engine's step."""
    with suppress(OSError):  # some sandboxes lack this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _MatchedSlot(NamedTuple):
    """A slot whose grammar is known to this process."""

    matcher: SlotMatcher
    may_jump: bool


class _MatchingServer:
    """A matching process: one thread answers steps, another compiles grammars that were found valid.

    Compiling releases the interpreter lock, so that steps are answered meanwhile.
    """

    def __init__(self, setup: ProcessSetup, tokenizer: LLTokenizer, shared: mmap.mmap, index: int) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[bytes, LLMatcher] = {}
        self._slots: dict[int, _MatchedSlot] = {}
        self._layout = setup.layout
        self._end_tokens = setup.end_tokens
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self._bytes = memoryview(shared)
        self._words = self._bytes.cast("i")
        self._nanoseconds = self._bytes[: 8 * setup.max_num_seqs].cast("q")
        self._index = index
        self._working_on = self._layout.working_on + index
        self._mask_bytes = 4 * self._layout.num_words
        self._none = bytes(self._mask_bytes)

    def run(self, steps: socket.socket, grammars: socket.socket, doorbell: int) -> None:
        """Serve until a link ends."""
        _use_free_processors()
        threading.Thread(target=self._serve_grammars, args=(grammars,), daemon=True).start()
        while True:
            os.eventfd_read(doorbell)
            if (asked := self._question()) is not None:
                send_answer(steps, self._step(asked))

    def _question(self) -> list[int] | None:
        """Return the question in shared memory; None while it is being written, after which the doorbell rings
        again.
        """
        layout, words = self._layout, self._words
        begin = layout.questions + self._index * layout.question_ints
        number, num_new, num_rows = words[begin : begin + HEAD_INTS]
        asked = words[begin : begin + HEAD_INTS + num_new * NEW_SLOT_INTS + num_rows * ROW_INTS].tolist()
        return asked if number >= 0 and words[begin] == number else None

    def _serve_grammars(self, link: socket.socket) -> None:
        """Compile and forget grammars: a frame is a key, then the kind and source of the grammar to compile, or
        nothing.
        """
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
        except BaseException:  # noqa: BLE001 - an engine that waits for this thread learns it by the end of the process
            traceback.print_exc()
            os._exit(1)

    def _step(self, asked: list[int]) -> StepAnswer:
        """Answer the question of a step, as `frames` describes it."""
        layout, words, began = self._layout, self._words, time.thread_time_ns()
        rows = HEAD_INTS + asked[1] * NEW_SLOT_INTS
        for place in range(HEAD_INTS, rows, NEW_SLOT_INTS):
            slot, *key, may_jump = asked[place : place + NEW_SLOT_INTS]
            self._admit(slot, array("i", key).tobytes(), bool(may_jump))
        num_unmasked = num_jumping = 0
        for place in range(rows, len(asked), ROW_INTS):
            slot = words[self._working_on] = asked[place + 1]
            start, length, is_sampled = asked[place + 2 : place + ROW_INTS]
            if is_sampled:
                words[layout.outputs + slot * layout.max_model_len + length - 1] = words[layout.newest + slot]
            status, num_forced = self._row(slot, start, length)
            num_unmasked += status is not RowStatus.MASKED
            num_jumping += num_forced > 1
            ended = time.thread_time_ns()
            self._nanoseconds[slot] += ended - began
            began = ended
        words[self._working_on] = -1
        return StepAnswer(asked[0], num_unmasked, num_jumping)

    def _admit(self, slot: int, key: bytes, may_jump: bool) -> None:
        compiled = self._compiled.get(key)
        self._slots.pop(slot, None)
        if compiled is not None:
            self._words[self._working_on] = slot
            self._slots[slot] = _MatchedSlot(SlotMatcher(compiled, self._end_tokens), may_jump)

    def _row(self, slot: int, start: int, length: int) -> tuple[RowStatus, int]:
        """Read a slot's output from shared memory, fill its mask, and write its forced tokens; returns the row's status
        and the number of forced tokens of use.
        """
        layout, words, known = self._layout, self._words, self._slots.get(slot)
        if known is None:
            words[layout.statuses + slot] = RowStatus.UNKNOWN
            return RowStatus.UNKNOWN, 0
        matcher, output = known.matcher, layout.outputs + slot * layout.max_model_len
        if start < length:
            matcher.output_is(start, words[output + start : output + length].tolist())
        begin = 4 * layout.masks + slot * self._mask_bytes
        end = begin + self._mask_bytes
        status, forced = matcher.fill(self._address + begin, self._mask_bytes), matcher.forced
        if forced:
            self._bytes[begin:end] = self._none
            self._bytes[begin + forced[0] // 8] = 1 << forced[0] % 8
        elif status is RowStatus.MASKED:
            for token in self._end_tokens:
                place, bit = begin + token // 8, 1 << token % 8
                if self._bytes[place] & bit and not matcher.may_end_with(token):
                    self._bytes[place] ^= bit
            if self._bytes[begin:end] == self._none:
                status = RowStatus.NOTHING
        words[layout.statuses + slot] = status
        count = min(len(forced), MAX_FORCED_TOKENS) if known.may_jump else 0
        words[layout.num_forced + slot] = count
        if count > 1:
            place = layout.forced + slot * MAX_FORCED_TOKENS
            words[place : place + count] = array("i", forced[:count])
        return status, count


if __name__ == "__main__":
    main()
