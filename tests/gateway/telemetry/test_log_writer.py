"""The writer of log lines: in order, never in anybody's way, and honest about what it lost."""

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gateway.telemetry.logs import log_writer
from gateway.telemetry.logs.log_writer import LogWriter


@dataclass
class Pipe:
    """Its reader reads when told to."""

    ends: tuple[int, int] = field(default_factory=os.pipe)

    @property
    def writing(self) -> int:
        return self.ends[1]

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            data += os.read(self.ends[0], 1 << 16)
        return data


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    for end in pipe.ends:
        try:
            os.close(end)
        except OSError:
            continue


def say(writer: LogWriter, text: str) -> None:
    writer.handle(logging.LogRecord("gateway", logging.INFO, "", 0, text, None, None))


def test_lines_come_in_order_and_whole_from_any_thread(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writing)
    threads = [
        threading.Thread(target=lambda n=n: [say(writer, f"{n} {i} {'x' * 99}") for i in range(100)])  # type: ignore[misc]
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(writer, "end")
    lines = pipe.read_until(b"end\n").decode().splitlines()
    writer.close()
    assert writer.num_dropped == 0
    for n in range(4):
        assert [line for line in lines if line.startswith(f"{n} ")] == [f"{n} {i} {'x' * 99}" for i in range(100)]


def test_a_reader_that_stops_holds_nobody_up_and_is_told_what_it_missed(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(pipe.writing, max_pending_bytes=200_000)
    monkeypatch.setattr(logging.getLogger(), "handlers", [writer])
    for i in range(1000):
        say(writer, f"{i:03} {'x' * 995}")  # a thousand bytes; the pipe holds 65 of them, the writer 200
    assert 700 <= writer.num_dropped <= 800
    data = pipe.read_until(b"read fast enough\n").decode().splitlines()
    kept = [line for line in data if line[0].isdigit() and line.endswith("x")]
    assert kept == sorted(kept) and len(kept) == 1000 - writer.num_dropped
    assert data[-1] == f"{writer.num_dropped} log lines were dropped: stderr was not read fast enough"
    say(writer, "after")
    pipe.read_until(b"after\n")
    writer.close()


def test_closing_writes_what_is_left(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writing)
    say(writer, "last words")
    writer.close()
    assert pipe.read_until(b"\n") == b"last words\n"


def test_closing_does_not_wait_for_a_reader_that_is_gone_for_good(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "CLOSE_SECONDS", 0.05)
    writer = LogWriter(pipe.writing)
    say(writer, "x" * 200_000)
    writer.close()
    pipe.read_until(b"x\n")  # lets its thread end


def test_a_pipe_without_a_reader_loses_lines_and_nothing_else(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writing)
    os.close(pipe.ends[0])
    say(writer, "to nobody")
    writer.close()
    assert writer.num_dropped == 1


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    writer = LogWriter(pipe.writing)
    say(writer, "x" * 300_000)
    assert len(pipe.read_until(b"\n")) == 300_001
    writer.close()
