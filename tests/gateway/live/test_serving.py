"""`sluice serve` as an operator meets it: TLS, a port that is taken, and a stop while clients are being answered."""

import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from shutil import which

import httpx
import pytest

from tests.gateway.raw_client import RawClient, completion, request
from tests.gateway.server_process import PATIENCE, ROOT, ServerProcess, running_server


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


def test_tls_streams_and_refuses_plain_text(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    flags = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--threads", "1"]
    with running_server(tmp_path, *flags) as server:
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


def test_a_tls_handshake_has_the_time_that_headers_have(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    flags = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--threads", "1", "--header-timeout", "0.2"]
    with running_server(tmp_path, *flags) as server:
        for port in (server.port, server.admin_port):
            with socket.create_connection(("127.0.0.1", port), timeout=50) as silent:
                assert silent.recv(1) == b"", "the loop's own timeout is 60 s"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_answers_end_and_takes_no_more(tmp_path: Path, stop: signal.Signals) -> None:
    with running_server(tmp_path, "--threads", "1") as server:
        busy, idle = RawClient(server), RawClient(server)
        busy.send(request(server, completion(max_tokens=600, ignore_eos=True, stream=True), "/v1/completions"))
        first = busy.receive()
        server.process.send_signal(stop)
        assert idle.is_closed()
        rest = b""
        while data := busy.receive():
            rest += data
        assert (first + rest).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        server.process.wait(PATIENCE)
        busy.close()
        idle.close()
        assert "Traceback" not in server.log.read_text()
        assert server.process.returncode == 0


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
        command = [sys.executable, "-m", "gateway.cli.main", "serve", "--port", port, "--state-dir", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"sluice: 127.0.0.1:{port} is in use")
    assert "Traceback" not in done.stderr


def test_a_demo_key_that_others_can_use_is_not_printed(tmp_path: Path) -> None:
    chosen = "sk-of-the-harbour-master-1887"
    with running_server(tmp_path, "--threads", "1", "--host", "0.0.0.0", "--demo-key", chosen) as server:
        reply = httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {chosen}"})
        assert reply.status_code == 200
        assert chosen not in server.announcement + server.log.read_text()
        assert server.key == "YOUR_KEY"


def test_the_demo_key_stays_the_same_over_a_restart(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        with running_server(tmp_path, "--threads", "1") as server:
            keys.append(server.key)
    assert keys[0] == keys[1]
