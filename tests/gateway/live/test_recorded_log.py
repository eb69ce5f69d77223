"""What a gateway recorded while real clients streamed, left and were refused is decided again to the byte."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.cli import main as cli
from gateway.settings.settings import Settings
from gateway.telemetry.event_log_file import read_event_log
from gateway.tenants.auth import new_key, pepper_of
from gateway.tenants.key_store import KeyStore
from tests.gateway.raw_client import RawClient, completion, request
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, running_server

LONG_PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, " * 15  # of several steps
FLAGS = ("--threads=1", "--max-num-seqs=2", "--max-num-batched-tokens=64", "--max-waiting=10")


class Recording(NamedTuple):
    log: Path
    waited: str  # id of a response that was not begun before another had ended


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Recording]:
    """Of a first start, and of a second that begins with the step times which the first has learned."""
    directory = tmp_path_factory.mktemp("server")
    keys = make_keys(directory / "state", "acme", "globex")
    first, second = (record(directory, directory / name, keys) for name in ("first", "second"))
    return first, second


def make_keys(state_dir: Path, *tenants: str) -> list[str]:
    store = KeyStore(state_dir)
    pepper = pepper_of(Settings(state_dir=state_dir), store)
    made = [new_key(tenant, pepper) for tenant in tenants]
    for _, entry in made:
        store.add(entry)
    return [key for key, _ in made]


def record(directory: Path, log: Path, keys: list[str]) -> Recording:
    """While the server runs its log can be read, up to what has just happened."""
    with running_server(directory, *FLAGS, f"--event-log={log}") as server:
        waited = traffic(server, keys)
        eventually(lambda: any(f'"{waited}-0"' in line for line in read_event_log(log)))
        return Recording(log, waited)


def traffic(server: ServerProcess, keys: list[str]) -> str:
    """Streams of two tenants fill the slots, others wait, more come than may wait; some leave in each state."""
    running = [stream(server, key, "3, 4,", 1500) for key in keys]
    for client in running:
        assert client.receive().startswith(b"HTTP/1.1 200")
    waiting = [stream(server, key, LONG_PROMPT, tokens) for key in keys for tokens in (10, 400)]
    eventually(lambda: server.metric("vllm:num_requests_waiting") == len(waiting))
    with ThreadPoolExecutor(12) as clients:
        answers = [clients.submit(ask, server, keys[n % 2]) for n in range(12)]
        eventually(lambda: any(answer.done() for answer in answers))
        waiting.pop().reset()
        for client in running:
            client.close()
        replies = [answer.result() for answer in answers]
    left_while_running = waiting.pop(1)
    left_while_running.receive()
    left_while_running.close()
    for client in waiting:
        assert client.reply().body.endswith(b"data: [DONE]\n\n")
        client.close()
    eventually(server.is_idle)
    return next(str(reply.json()["id"]) for reply in replies if reply.status_code == 200)


def stream(server: ServerProcess, key: str, prompt: str, max_tokens: int) -> RawClient:
    """A client whose request is on its way."""
    client = RawClient(server)
    body = completion(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, stream=True)
    client.send(request(server, body, "/v1/completions", authorization=f"Bearer {key}"))
    return client


def ask(server: ServerProcess, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = completion(max_tokens=24)
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)


def count(log: Path, matches: Callable[[list[Any]], object]) -> int:
    return sum(bool(matches(json.loads(line))) for line in read_event_log(log))


def test_the_log_holds_what_is_hard_to_decide_again(recordings: tuple[Recording, Recording]) -> None:
    for log, _ in recordings:
        assert count(log, lambda entry: entry[0] == "arrive" and entry[3] == "acme") > 2
        assert count(log, lambda entry: entry[0] == "arrive" and entry[3] == "globex") > 2
        assert count(log, lambda entry: entry[0] == "arrive" and entry[-1] == "QueueFull") > 0
        assert count(log, lambda entry: entry[0] == "finish" and entry[3] == "cancelled") >= 4
        assert count(log, lambda entry: entry[0] == "plan" and entry[3] and entry[5]) > 2, "prefill beside decodes"


def test_a_replay_of_what_was_served_decides_the_same(
    recordings: tuple[Recording, Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    for log, _ in recordings:
        assert cli.main(["replay", "--log", str(log)]) == 0
        lines = sum(1 for _ in read_event_log(log))
        assert f"{lines} entries reproduced" in capsys.readouterr().out


def test_a_request_that_waited_is_told_why(
    recordings: tuple[Recording, Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    for log, waited in recordings:
        assert cli.main(["explain", waited, "--log", str(log)]) == 0
        request_record = capsys.readouterr().out
        assert "admitted after waiting" in request_record
        assert "max_num_seqs sequences were running" in request_record


def test_whoever_asks_by_the_id_of_a_refusal_is_told_where_the_response_id_is(
    recordings: tuple[Recording, Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    (log, _), _ = recordings
    assert cli.main(["explain", "req_0123456789abcdef", "--log", str(log)]) == 1
    assert "response_id in the line that has its request_id" in capsys.readouterr().err
