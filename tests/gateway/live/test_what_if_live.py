"""What a real gateway's limits refused, a simulation of its event log refuses as well; and what other limits would."""

import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from gateway.cli.main import main
from gateway.telemetry.event_log_file import read_event_log
from tests.gateway.live.test_recorded_log import make_keys, stream
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, running_server

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
TENANTS = ("counted", "spender", "busy", "roomy")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str]]:
    """An event log, and the refusals that clients were told, by limit."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "policy.yaml").write_text(POLICY)
    (directory / "edited.yaml").write_text(EDITED)
    keys = dict(zip(TENANTS, make_keys(directory / "state", *TENANTS), strict=True))
    log = directory / "events.log"
    with running_server(
        directory, "--threads=1", f"--policy={directory / 'policy.yaml'}", f"--event-log={log}"
    ) as server:
        told = traffic(server, keys)
        eventually(lambda: sum('["finish"' in line for line in read_event_log(log)) >= 2)
    return directory, told


def traffic(server: ServerProcess, keys: dict[str, str]) -> Counter[str]:
    """One after another, so that it is the limits that decide; and streams side by side that last."""
    told: Counter[str] = Counter()
    for _ in range(9):
        told += ask(server, keys["counted"], 4)
    for _ in range(20):
        told += ask(server, keys["spender"], 25, service_tier="flex")
    running = [stream(server, keys["busy"], "3, 4,", 1500) for _ in range(2)]
    for client in running:
        assert client.receive().startswith(b"HTTP/1.1 200")
    for _ in range(3):
        told += ask(server, keys["busy"], 4)
    for client in running:
        client.close()
    told += ask(server, keys["roomy"], 4, prompt=["1, 2,", "3, 4,"])
    return told


def ask(server: ServerProcess, key: str, max_tokens: int, **more: object) -> Counter[str]:
    body = {"model": "embedded", "prompt": "1, 2,", "max_tokens": max_tokens, "ignore_eos": True, **more}
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    if reply.status_code == 200:
        return Counter()
    assert reply.status_code == 429, reply.text
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
    assert main(["explain", refused[2], "--log", str(log)]) == 0
    assert "refused before it came to the queue: tokens/day" in capsys.readouterr().out
