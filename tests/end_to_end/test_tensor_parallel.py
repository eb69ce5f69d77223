"""A gateway whose model is on two ranks: it answers as with one, and ends as a whole."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.http_workers import children
from tests.gateway.server_process import BODY, PATIENCE, ServerProcess, eventually, running_server

LONG = {"ignore_eos": True, "max_tokens": 1500} | BODY


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The last test of it ends it."""
    with running_server(tmp_path_factory.mktemp("parallel"), "--tensor-parallel", "2", "--threads", "2") as process:
        yield process


def ranks(server: ServerProcess) -> list[int]:
    """The process ids of the ranks that it has started."""
    return [pid for pid in children(server) if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_it_answers_and_a_client_that_leaves_frees_its_memory(parallel: ServerProcess, server: ServerProcess) -> None:
    assert "on 2 ranks of cpu" in parallel.announcement
    texts = [
        one.post("/v1/chat/completions", temperature=0, **BODY).json()["choices"][0]["message"]["content"]
        for one in (parallel, server)
    ]
    assert texts[0] == texts[1]
    with parallel.stream("/v1/chat/completions", **LONG) as reply:
        next(reply.iter_lines())
    eventually(parallel.is_idle)
    assert parallel.answers()


def test_a_rank_that_dies_ends_streams_with_a_typed_error_and_the_process(parallel: ServerProcess) -> None:
    (rank,) = ranks(parallel)
    with parallel.stream("/v1/chat/completions", **LONG) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(rank, signal.SIGKILL)
        rest = "\n".join(lines)
    assert '"error":{"message":"The engine failed' in rest
    assert "[DONE]" not in rest
    assert parallel.process.wait(PATIENCE) == 1
    assert "rank 1 of the model has ended: it was killed by signal 9" in parallel.log.read_text()
