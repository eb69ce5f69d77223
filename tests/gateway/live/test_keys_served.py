"""Keys made, rotated and revoked beside a running gateway, as an admin and a client see it."""

import csv
import subprocess
import sys
from io import StringIO
from pathlib import Path

import httpx
import pytest

from tests.gateway.server_process import ServerProcess, eventually

CHAT = {"model": "embedded", "max_tokens": 3, "messages": [{"role": "user", "content": "Count from 3 to 12."}]}


@pytest.fixture
def state(server: ServerProcess) -> Path:
    return server.log.parent / "state"


def sluice(state: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "gateway.cli.main", *arguments, "--state-dir", str(state)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def limits_status(server: ServerProcess, key: str) -> int:
    return httpx.get(f"{server.url}/v1/limits", headers={"authorization": f"Bearer {key}"}).status_code


def chat(server: ServerProcess, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=240)


def test_a_key_opens_the_running_gateway_until_it_is_rotated_and_revoked(server: ServerProcess, state: Path) -> None:
    old = sluice(state, "keys", "create", "acme")
    key_id = old.split("-")[2]
    eventually(lambda: limits_status(server, old) == 200)
    new = sluice(state, "keys", "rotate", key_id, "--overlap", "1h")
    eventually(lambda: limits_status(server, new) == 200)
    assert limits_status(server, old) == 200
    newest = sluice(state, "keys", "rotate", key_id, "--overlap", "0s")
    eventually(lambda: limits_status(server, newest) == 200)
    assert limits_status(server, old) == limits_status(server, new) == 401
    sluice(state, "keys", "revoke", key_id)
    eventually(lambda: limits_status(server, newest) == 401)


def test_a_key_is_good_for_its_scopes_alone(server: ServerProcess, state: Path) -> None:
    key = sluice(state, "keys", "create", "acme", "--scopes", "limits")
    eventually(lambda: limits_status(server, key) == 200)
    refused = chat(server, key)
    assert (refused.status_code, "its scopes are limits" in refused.text) == (403, True)
    other = sluice(state, "keys", "create", "acme", "--scopes", "inference")
    eventually(lambda: limits_status(server, other) == 403)
    assert chat(server, other).status_code == 200


def test_what_a_running_gateway_served_is_in_the_ledger(server: ServerProcess, state: Path) -> None:
    key = sluice(state, "keys", "create", "ledger.tenant")
    eventually(lambda: limits_status(server, key) == 200)
    used = chat(server, key).json()["usage"]

    def rows() -> list[dict[str, str]]:
        return list(
            csv.DictReader(
                StringIO(
                    sluice(state, "usage", "--csv", "--by", "key", "--from", "2000-01-01", "--tenant", "ledger.tenant")
                )
            )
        )

    eventually(lambda: bool(rows()))
    (row,) = rows()
    assert (row["key"], row["requests"]) == (key.split("-")[2], "1")
    assert (row["input_tokens"], row["output_tokens"]) == (str(used["prompt_tokens"]), str(used["completion_tokens"]))
