"""What a gateway recorded is decided again to the byte, and a simulation of it refuses what its limits refused."""

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.cli import main as cli
from gateway.cli.main import main
from gateway.telemetry.event_log_file import read_event_log
from tests.gateway.raw_client import RawClient, completion, request
from tests.gateway.server_process import ServerProcess, eventually, running_server
from tests.gateway.tenant_site import make_keys

LOGGED_AS: list[str] = []  # ids of refusals
LONG_PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, " * 15  # of several steps
FLAGS = ("--threads=1", "--max-num-seqs=2", "--max-num-batched-tokens=64", "--max-waiting=10")


class Recording(NamedTuple):
    log: Path
    waited: str  # id of a response that was not begun before another had ended


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Recording]:
    """Of a first start, and of a second that begins with the step times which the first has learned, and drafts."""
    directory = tmp_path_factory.mktemp("server")
    keys = list(make_keys(directory / "state", "acme", "globex").values())
    first, second = (record(directory, directory / how, keys, how) for how in ("off", "lookup"))
    return first, second


def record(directory: Path, log: Path, keys: list[str], speculate: str) -> Recording:
    """While the server runs its log can be read, up to what has just happened."""
    with running_server(directory, *FLAGS, f"--event-log={log}", f"--speculate={speculate}") as server:
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
        asks = partial(server.post, "/v1/completions", **completion(max_tokens=24))
        answers = [clients.submit(asks, key=keys[n % 2]) for n in range(12)]
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
    decoding = stream(server, keys[0], "3, 4,", 1500)
    decoding.receive()
    beside = completion(prompt=f"9, {LONG_PROMPT}", max_tokens=2)  # found in no cache
    assert server.post("/v1/completions", key=keys[1], **beside).status_code == 200
    decoding.close()
    repeating = completion(prompt="Once there was a small cat", max_tokens=200, ignore_eos=True)
    assert server.post("/v1/completions", key=keys[0], **repeating).status_code == 200
    eventually(server.is_idle)
    return next(str(reply.json()["id"]) for reply in replies if reply.status_code == 200)


def stream(server: ServerProcess, key: str, prompt: str, max_tokens: int) -> RawClient:
    client = RawClient(server)
    body = completion(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, stream=True)
    client.send(request(server, body, "/v1/completions", authorization=f"Bearer {key}"))
    return client


def count(log: Path, matches: Callable[[list[Any]], object]) -> int:
    return sum(bool(matches(json.loads(line))) for line in read_event_log(log))


def test_the_log_holds_what_is_hard_to_decide_again(recordings: tuple[Recording, Recording]) -> None:
    for log, _ in recordings:
        assert count(log, lambda entry: entry[0] == "arrive" and entry[3] == "acme") > 2
        assert count(log, lambda entry: entry[0] == "arrive" and entry[3] == "globex") > 2
        assert count(log, lambda entry: entry[0] == "arrive" and entry[15] == "QueueFull") > 0
        assert count(log, lambda entry: entry[0] == "finish" and entry[3] == "cancelled") >= 4
        assert count(log, lambda entry: entry[0] == "plan" and entry[3] and entry[5]) > 2, "prefill beside decodes"
    assert count(recordings[1].log, lambda entry: isinstance(entry[-1], dict) and "drafted" in entry[-1]) > 2


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


def test_a_prefix_hit_is_replayed_explained_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, (key,) = tmp_path / "log", make_keys(tmp_path / "state", "acme").values()
    with running_server(tmp_path, *FLAGS, f"--event-log={log}") as server:
        prompts = (LONG_PROMPT, f"{LONG_PROMPT} and on, 11, 12, 13,")
        asks = [completion(prompt=prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        first, second = (server.post("/v1/completions", key=key, **ask).json() for ask in asks)
        eventually(lambda: count(log, lambda entry: entry[0] == "done" and entry[4] + entry[5]) == 2)
    prompt, cached = (second["usage"][name] for name in ("prompt_tokens", "prompt_tokens_details"))
    found = cached["cached_tokens"]
    assert found > 100 and not first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert count(log, lambda entry: entry[0] == "done" and isinstance(entry[-1], dict) and entry[-1]["blocks"]) == 2
    assert LONG_PROMPT not in log.read_text()
    assert cli.main(["replay", "--log", str(log)]) == 0
    assert cli.main(["explain", second["id"], "--log", str(log)]) == 0
    assert f"of its {prompt} prompt tokens {found} were cached, and are not computed" in capsys.readouterr().out
    report = tmp_path / "report.json"
    assert cli.main(["simulate", "--trace", str(log), "--json", str(report)]) == 0
    (policy,) = json.loads(report.read_text())["policies"]
    assert policy["runs"][0]["hit_rate"] == pytest.approx(found / (first["usage"]["prompt_tokens"] + prompt))


def test_a_question_about_an_id_that_the_log_lacks_says_where_ids_are(
    recordings: tuple[Recording, Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    (log, _), _ = recordings
    assert cli.main(["explain", "req_0123456789abcdef", "--log", str(log)]) == 1
    assert "A refusal names its id in the header x-sluice-logged-as" in capsys.readouterr().err


POLICY = """\
tenants:
  counted: {limits: {requests: 6/day}}
  spender: {limits: {tokens: 400/day}}
  busy: {default_class: batch, limits: {concurrent_requests: 2}}
  roomy: {limits: {kv_bytes: 8MiB}}
"""
EDITED = """\
tenants:
  counted: {limits: {requests: 3/day}}
  spender: {}
  busy: {highest_class: batch, limits: {concurrent_requests: 1}}
  roomy: {limits: {kv_bytes: 8MiB}}
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str]]:
    """An event log, and the refusals that clients were told, by limit."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "policy.yaml").write_text(POLICY)
    (directory / "edited.yaml").write_text(EDITED)
    keys = make_keys(directory / "state", "counted", "spender", "busy", "roomy")
    log = directory / "events.log"
    flags = ("--threads=1", f"--policy={directory / 'policy.yaml'}", f"--event-log={log}")
    with running_server(directory, *flags) as server:
        told = limited_traffic(server, keys)
        eventually(lambda: sum('["finish"' in line for line in read_event_log(log)) >= 2)
    return directory, told


def limited_traffic(server: ServerProcess, keys: dict[str, str]) -> Counter[str]:
    """One after another, so that it is the limits that decide; and streams side by side that last."""
    told: Counter[str] = Counter()
    for _ in range(9):
        told += refusals(server, keys["counted"], 4)
    for _ in range(20):
        told += refusals(server, keys["spender"], 25, service_tier="flex")
    running = [stream(server, keys["busy"], "3, 4,", 1500) for _ in range(2)]
    for client in running:
        assert client.receive().startswith(b"HTTP/1.1 200")
    for _ in range(3):
        told += refusals(server, keys["busy"], 4)
    for client in running:
        client.close()
    told += refusals(server, keys["roomy"], 4, prompt=["1, 2,", "3, 4,"])
    return told


def refusals(server: ServerProcess, key: str, max_tokens: int, **more: object) -> Counter[str]:
    body = {"model": "embedded", "prompt": "1, 2,", "max_tokens": max_tokens, "ignore_eos": True, **more}
    reply = server.post("/v1/completions", key=key, **body)
    if reply.status_code == 200:
        return Counter()
    assert reply.status_code == 429, reply.text
    LOGGED_AS.append(reply.headers["x-sluice-logged-as"])
    return Counter([reply.json()["error"]["limit"]])


def simulated(recorded: tuple[Path, Counter[str]], *flags: str) -> list[dict]:  # type: ignore[type-arg]
    directory, _ = recorded
    report = directory / "report.json"
    assert main(["simulate", "--trace", str(directory / "events.log"), *flags, "--json", str(report)]) == 0
    return [policy["runs"][0] for policy in json.loads(report.read_text())["policies"]]


def test_the_same_policy_refuses_what_it_refused(recorded: tuple[Path, Counter[str]]) -> None:
    directory, told = recorded
    assert told.keys() == {"requests/day", "tokens/day", "concurrent_requests"}
    as_recorded, again = simulated(recorded, "--compare", str(directory / "policy.yaml"))
    assert again["refusals"] == as_recorded["refusals"] == dict(told)
    assert {level["name"]: level["offered"] for level in again["classes"]} == {"standard": 11, "batch": 25}


def test_an_edit_refuses_what_it_would(recorded: tuple[Path, Counter[str]], capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = recorded
    flags = ["--policy", str(directory / "policy.yaml"), "--compare", str(directory / "edited.yaml")]
    _, edited = simulated(recorded, *flags)
    assert edited["refusals"] == {"requests/day": 6, "concurrent_requests": 4}
    printed = capsys.readouterr().out
    assert "limits.requests: 6/day -> 3/day" in printed and "not simulated" not in printed


def test_the_log_is_replayed_and_a_refusal_explained(
    recorded: tuple[Path, Counter[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = recorded
    log = directory / "events.log"
    assert main(["replay", "--log", str(log)]) == 0
    entries = [json.loads(line) for line in read_event_log(log)]
    refused = next(entry for entry in entries if entry[0] == "request" and entry[-1] == "tokens/day")
    assert refused[2] in LOGGED_AS
    assert main(["explain", refused[2], "--log", str(log)]) == 0
    assert "refused before it came to the queue: tokens/day" in capsys.readouterr().out
    for name in LOGGED_AS:
        assert main(["explain", name, "--log", str(log)]) == 0
