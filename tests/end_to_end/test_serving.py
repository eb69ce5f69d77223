"""`sluice serve` as an operator meets it: TLS, ports, signals, keys that come and go, and a calendar that jumps."""

import csv
import signal
import socket
import ssl
import subprocess
import sys
from io import StringIO
from pathlib import Path
from shutil import which

import httpx
import pytest

from tests.gateway.raw_client import completion
from tests.gateway.server_process import BODY, PATIENCE, ROOT, ServerProcess, eventually, running_server, sluice


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    named = ["-subj", "/CN=sluice", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", *made, *named, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_streams_and_refuses_plain_text_and_silence(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    flags = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--threads", "1", "--header-timeout", "3"]
    with running_server(tmp_path, *flags) as server:
        waiting = [socket.create_connection(("127.0.0.1", port), 50) for port in (server.port, server.admin_port)]
        assert f"curl -N https://127.0.0.1:{server.port}/" in server.announcement
        url = f"https://127.0.0.1:{server.port}"
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert)), headers=server.headers) as client:
            body = completion(stream=True, max_tokens=20, ignore_eos=True)
            with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                events = [line for line in reply.iter_lines() if line]
            assert len(events) >= 20
            assert events[-1] == "data: [DONE]"
            assert client.post(f"{url}/v1/completions", content=b" " * 20_000_000).status_code == 413
            admin = client.get(f"https://127.0.0.1:{server.admin_port}/admin/v1/kv", headers=server.admin_headers)
            assert admin.status_code == 200
        probe = {"SLUICE_ADMIN_PORT": str(server.admin_port), "SLUICE_TLS_CERT_FILE": str(cert)}
        subprocess.run([sys.executable, ROOT / "deploy" / "livez.py"], env=probe, check=True)
        for port in (server.port, server.admin_port):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/livez")
        for silent in waiting:
            assert silent.recv(1) == b"", "the loop's own timeout for a handshake is 60 s"
            silent.close()


@pytest.mark.skipif(which("curl") is None, reason="curl is not installed")
def test_the_announced_command_streams_an_answer(server: ServerProcess) -> None:
    command = next(line for line in server.announcement.splitlines() if line.startswith("curl "))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE, check=True)
    events = [line for line in done.stdout.splitlines() if line]
    assert len(events) > 10
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def test_a_port_that_is_taken_is_said_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = sluice("serve", "--port", port, "--state-dir", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"sluice: 127.0.0.1:{port} is in use")
    assert "Traceback" not in done.stderr


def test_floors_that_leave_no_room_to_serve_are_said_at_the_start_with_their_place(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tenants:\n  acme: {prefix_cache: {floor: 1TiB}}\n")
    done = sluice("serve", "--port", "0", "--state-dir", tmp_path, "--policy", policy, "--threads", "1")
    assert done.returncode == 2
    assert f"{policy}:2:25: tenants.acme.prefix_cache.floor: floors keep 1,024.00 GiB" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_demo_key_that_others_can_use_is_not_printed(tmp_path: Path) -> None:
    chosen = "sk-of-the-harbour-master-1887"
    with running_server(tmp_path, "--threads", "1", "--host", "0.0.0.0", "--demo-key", chosen) as server:
        assert server.get("/v1/models", chosen).status_code == 200
        assert chosen not in server.announcement + server.log.read_text()
        assert server.key == "YOUR_KEY"


@pytest.fixture
def state(server: ServerProcess) -> Path:
    return server.log.parent / "state"


def printed(state: Path, *arguments: str) -> str:
    done = sluice(*arguments, "--state-dir", state)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def limits_status(server: ServerProcess, key: str) -> int:
    return server.get("/v1/limits", key).status_code


def chat(server: ServerProcess, key: str) -> httpx.Response:
    return server.post("/v1/chat/completions", key=key, **BODY, max_tokens=3)


def test_a_key_opens_the_running_gateway_until_it_is_rotated_and_revoked(server: ServerProcess, state: Path) -> None:
    old = printed(state, "keys", "create", "acme")
    key_id = old.split("-")[2]
    eventually(lambda: limits_status(server, old) == 200)
    new = printed(state, "keys", "rotate", key_id, "--overlap", "1h")
    eventually(lambda: limits_status(server, new) == 200)
    assert limits_status(server, old) == 200
    newest = printed(state, "keys", "rotate", key_id, "--overlap", "0s")
    eventually(lambda: limits_status(server, newest) == 200)
    assert limits_status(server, old) == limits_status(server, new) == 401
    printed(state, "keys", "revoke", key_id)
    eventually(lambda: limits_status(server, newest) == 401)


def test_a_key_is_good_for_its_scopes_alone(server: ServerProcess, state: Path) -> None:
    key = printed(state, "keys", "create", "acme", "--scopes", "limits")
    eventually(lambda: limits_status(server, key) == 200)
    refused = chat(server, key)
    assert (refused.status_code, "its scopes are limits" in refused.text) == (403, True)
    other = printed(state, "keys", "create", "acme", "--scopes", "inference")
    eventually(lambda: limits_status(server, other) == 403)
    assert chat(server, other).status_code == 200


def test_requests_of_a_running_gateway_are_in_the_ledger(server: ServerProcess, state: Path) -> None:
    key = printed(state, "keys", "create", "ledger.tenant")
    eventually(lambda: limits_status(server, key) == 200)
    used = chat(server, key).json()["usage"]

    def rows() -> list[dict[str, str]]:
        asked = ("usage", "--csv", "--by", "key", "--from", "2000-01-01", "--tenant", "ledger.tenant")
        return list(csv.DictReader(StringIO(printed(state, *asked))))

    eventually(lambda: bool(rows()))
    (row,) = rows()
    assert (row["key"], row["requests"]) == (key.split("-")[2], "1")
    assert (row["input_tokens"], row["output_tokens"]) == (str(used["prompt_tokens"]), str(used["completion_tokens"]))


POLICY = "tenants: {demo: {limits: {requests: {rate: 10/h, burst: 6}, concurrent_requests: 4}}}"


def test_a_jump_back_and_one_forward_change_nothing_for_clients(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    flags = ("--threads=1", f"--policy={policy}")
    with (
        running_server(tmp_path, *flags, program="tests.gateway.jumping_server") as server,
        httpx.Client(base_url=server.url, headers=server.headers, timeout=PATIENCE) as client,
    ):

        def ask() -> httpx.Response:
            deadline = {"x-sluice-deadline-ms": "240000"}
            return client.post("/v1/completions", json=completion(), headers=deadline)

        def limits() -> dict[str, int]:
            entries = client.get("/v1/limits").json()["data"]
            return {entry["resource"]: entry["remaining"] for entry in entries}

        created = [ask().json()["created"]]
        with server.stream("/v1/completions", **completion(ignore_eos=True, max_tokens=600)) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            for jump in (signal.SIGUSR1, signal.SIGUSR2):
                server.process.send_signal(jump)
                created.append(ask().json()["created"])
            assert limits() == {"requests": 2, "concurrent_requests": 3}
            assert list(lines)[-1] == "data: [DONE]"
        eventually(lambda: limits() == {"requests": 2, "concurrent_requests": 4})
        assert [ask().status_code for _ in range(3)] == [200, 200, 429]
        year = pytest.approx(365 * 86_400, abs=3600)
        assert created[0] - created[1] == year == created[2] - created[0]
        assert '"level":"ERROR"' not in server.log.read_text()
