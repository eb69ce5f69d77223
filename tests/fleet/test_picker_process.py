"""`sluice pick` as a process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from fleet.ext_proc.messages import HealthCheckRequest, HealthCheckResponse
from fleet.ext_proc.server import EXT_PROC, HEALTH, NOT_SERVING, SERVING
from tests.gateway.server_process import PATIENCE, ROOT, sluice

ONE = "replicas: [{url: 'http://127.0.0.1:9', admin: 'http://127.0.0.1:9'}]"


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[int]:
    """Yield the port of a picker whose only replica is not there; it ends well at the end."""
    file = folder / "replicas.yaml"
    file.write_text(ONE)
    command = [sys.executable, "-m", "sluice", "pick", "--replicas", str(file), "--state-dir", str(folder)]
    with (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [*command, "--port", "0", "--admin-port", "off", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=err
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert " picks endpoints at grpc://127.0.0.1:" in line, (folder / "stderr").read_text()
        yield int(line.rpartition(":")[2])
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_it_says_that_it_lives_and_that_it_knows_no_replica_yet(tmp_path: Path) -> None:
    with running(tmp_path) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        asked = {name: check(HealthCheckRequest(service=name)).status for name in ("liveness", "readiness", EXT_PROC)}
        assert asked == {"liveness": SERVING, "readiness": NOT_SERVING, EXT_PROC: NOT_SERVING}
        again = sluice("pick", "--replicas", tmp_path / "replicas.yaml", "--port", str(port), "--admin-port", "off")
        assert again.returncode == 1
        assert f"127.0.0.1:{port} cannot be listened on: it is in use" in again.stderr
