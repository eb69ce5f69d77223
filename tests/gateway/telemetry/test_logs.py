"""Which logs a gateway writes, by its settings."""

import fcntl
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from gateway.settings import Settings
from gateway.telemetry.logs.logs import logging_to, num_lines_dropped
from tests.gateway.server_process import PATIENCE, running_server


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


def test_what_is_asked_for_wins_over_dev(file: TextIO) -> None:
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


def test_a_gateway_whose_log_nobody_reads_serves_and_stops_as_ever(tmp_path: Path) -> None:
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
