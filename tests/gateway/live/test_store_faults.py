"""The quota store hangs, dies and forgets under a gateway that serves; a replica dies."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.server_process import ServerProcess, eventually, running_server
from tests.gateway.stoppable_store import StoppableStore

AMOUNT = 1_000_000
POLICY = f"tenants: {{demo: {{limits: {{tokens: {AMOUNT}/month, concurrent_requests: 40}}}}}}"
LEASE = "6"
LONG = "Tell me a long story about a fox and a lighthouse."


@pytest.fixture(scope="module")
def flags(store: StoppableStore, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY)
    return ["--threads=1", f"--policy={policy}", f"--redis-url=unix://{store.path}", f"--quota-lease={LEASE}"]


@pytest.fixture(scope="module")
def server(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("one"), *flags) as server:
        yield server


def ask(server: ServerProcess, **more: Any) -> httpx.Response:
    body = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}], "max_tokens": 20}
    return server.post("/v1/chat/completions", **body | more)


def tokens(*replies: httpx.Response) -> int:
    assert [reply.status_code for reply in replies] == [200] * len(replies)
    return sum(reply.json()["usage"]["total_tokens"] for reply in replies)


def used(server: ServerProcess) -> int:
    return AMOUNT - server.remaining("tokens")


def held(server: ServerProcess) -> int:
    return 40 - server.remaining("concurrent_requests")


def is_connected(server: ServerProcess) -> bool:
    return bool(httpx.get(f"{server.url}/readyz").json()["quota_store"] == "connected")


def has_slice(store: StoppableStore) -> bool:
    with store.client as client:
        return any(name.startswith(b"s:") for name in client.hkeys("sluice:{demo}"))


def test_requests_go_on_while_the_store_hangs_and_are_charged_afterwards(
    store: StoppableStore, server: ServerProcess
) -> None:
    spent = tokens(ask(server))
    eventually(lambda: has_slice(store))
    before = used(server)
    replies: list[httpx.Response] = []
    stream = threading.Thread(target=lambda: replies.append(ask(server, ignore_eos=True, max_tokens=400)))
    stream.start()
    eventually(lambda: held(server) == 1)
    store.signal(signal.SIGSTOP)
    try:
        replies += [ask(server) for _ in range(5)]
        assert not is_connected(server)
        stream.join()
    finally:
        store.signal(signal.SIGCONT)
    spent = tokens(*replies)
    eventually(lambda: is_connected(server) and held(server) == 0)
    eventually(lambda: used(server) - before == spent)


@pytest.mark.parametrize("fault", ["killed", "flushed"])
def test_a_store_that_forgot_everything_is_told_what_was_used(
    store: StoppableStore, server: ServerProcess, fault: str
) -> None:
    tokens(ask(server))
    eventually(lambda: has_slice(store))
    before = used(server)
    if fault == "killed":
        store.kill()
        replies = [ask(server) for _ in range(3)]
        store.start()
    else:
        with store.client as client:
            client.flushall()
        replies = [ask(server) for _ in range(3)]
    spent = tokens(*replies)
    eventually(lambda: is_connected(server) and held(server) == 0)
    eventually(lambda: used(server) >= before + spent)
    assert used(server) <= before + spent + 100, "at most what was reserved when it was last seen"
    assert tokens(ask(server))


def test_a_killed_replica_leaves_nothing_held_past_its_lease(
    server: ServerProcess, flags: list[str], tmp_path: Path
) -> None:
    with running_server(tmp_path, *flags) as other:
        tokens(ask(other))
        stream = {"messages": [{"role": "user", "content": LONG}], "ignore_eos": True, "max_tokens": 1500}
        threads = [threading.Thread(target=_broken, args=(other, stream)) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: held(server) >= 3)
        os.kill(other.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    eventually(lambda: tokens(ask(server)) > 0 and held(server) == 0)


def _broken(server: ServerProcess, body: dict[str, Any]) -> None:
    with pytest.raises(httpx.HTTPError):
        ask(server, **body)
