import errno
import fcntl
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest

from gateway.settings.settings import Settings
from gateway.telemetry.logs import logs as log_writer
from gateway.telemetry.logs.logs import LogWriter, logging_to, num_lines_dropped
from tests.gateway.server_process import PATIENCE, eventually, running_server


@dataclass
class Pipe:
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


def test_a_stopped_reader_delays_no_request_and_is_told_of_its_losses(
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


def test_a_message_that_does_not_fit_its_arguments_is_not_its_callers_trouble(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writing)
    writer.handle(logging.LogRecord("library", logging.WARNING, "its.py", 7, "%d of %d", (1,), None))
    say(writer, "next")
    assert pipe.read_until(b"next\n") == b"a line of its.py:7 cannot be written (TypeError)\nnext\n"
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


def test_lines_lost_to_a_full_disk_are_told_once_there_is_room(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write, tried = LogWriter(pipe.writing), os.write, threading.Event()
    monkeypatch.setattr(logging.getLogger(), "handlers", [writer])

    def full(fd: int, data: bytes) -> int:
        tried.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        say(writer, "lost")
        assert tried.wait(PATIENCE)
        eventually(lambda: writer.num_dropped == 1)
    assert os.write is write
    say(writer, "kept")
    told = pipe.read_until(b"left on device)\n").decode().splitlines()
    assert told == ["kept", "1 log lines were dropped: stderr could not be written (No space left on device)"]
    writer.close()


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    writer = LogWriter(pipe.writing)
    say(writer, "x" * 300_000)
    assert len(pipe.read_until(b"\n")) == 300_001
    writer.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "log").open("w+") as file:
        yield file


def logged(file: TextIO, **settings: Any) -> list[str]:
    with logging_to(file.fileno(), Settings(**settings)):
        logging.getLogger("gateway.x").debug("a detail")
        logging.getLogger("gateway.x").info("news")
        logging.getLogger("library").info("chatter")
        logging.getLogger("library").warning("trouble")
        assert num_lines_dropped() == 0
    return Path(file.name).read_text().splitlines()


def messages(lines: list[str]) -> list[str]:
    return [line.split(maxsplit=2)[2] for line in lines]


def test_a_file_gets_json_from_info_on_and_libraries_from_warnings_on(file: TextIO) -> None:
    assert [json.loads(line)["message"] for line in logged(file)] == ["news", "trouble"]


def test_text_can_be_asked_for(file: TextIO) -> None:
    assert messages(logged(file, log_format="text")) == ["news", "trouble"]


def test_dev_is_text_from_debug_on(file: TextIO) -> None:
    assert messages(logged(file, dev=True)) == ["a detail", "news", "trouble"]


def test_an_explicit_log_format_wins_over_dev(file: TextIO) -> None:
    lines = logged(file, dev=True, log_level="warning", log_format="json")
    assert [json.loads(line)["message"] for line in lines] == ["trouble"]


def test_a_terminal_gets_text_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal, logging_to(terminal.fileno(), Settings()):
        logging.getLogger("gateway.x").warning("careful")
        assert b"\033[33mWARNING \033[0m careful" in os.read(reading, 4096)
    os.close(reading)


def test_warnings_of_python_are_logged(file: TextIO) -> None:
    with warnings.catch_warnings(), logging_to(file.fileno(), Settings()):
        warnings.simplefilter("always")
        warnings.warn("an old function", stacklevel=1)
    assert "an old function" in Path(file.name).read_text()


def test_nothing_of_it_is_left_afterwards(file: TextIO) -> None:
    root, ours = logging.getLogger(), logging.getLogger("gateway")
    before = (list(root.handlers), root.level, ours.level, logging.logThreads)
    logged(file, log_level="error")
    assert (list(root.handlers), root.level, ours.level, logging.logThreads) == before


def test_a_gateway_with_an_unread_log_serves_and_stops_as_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stderr")
    unread = os.open(tmp_path / "stderr", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)
    with running_server(tmp_path, "--threads", "1") as server:
        for _ in range(20):  # twelve kilobytes
            assert server.answers()
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
    assert b"stopped" not in os.read(unread, 1 << 16), "it was full long before"
    os.close(unread)
