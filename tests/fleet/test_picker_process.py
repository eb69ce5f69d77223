import socket
from pathlib import Path

from fleet.ext_proc.server import EXT_PROC, NOT_SERVING, SERVING
from tests.fleet.ext_proc_gateway import WHOLE, body, head
from tests.fleet.picker_process import answers, health, running_picker
from tests.gateway.server_process import sluice

NOBODY = "replicas: [{url: 'http://127.0.0.1:9', admin: 'http://127.0.0.1:9'}]"


def test_it_says_that_it_lives_and_that_it_knows_no_replica_yet(tmp_path: Path) -> None:
    (tmp_path / "replicas.yaml").write_text(NOBODY)
    with running_picker(tmp_path, "--state-dir", str(tmp_path), "--demo-key", "sk-correct-horse-battery") as channel:
        asked = {name: health(channel, name) for name in ("liveness", "readiness", EXT_PROC)}
        assert asked == {"liveness": SERVING, "readiness": NOT_SERVING, EXT_PROC: NOT_SERVING}
        (told,) = answers(channel, head(key="sk-correct-horse-battery"), *body(WHOLE))
        assert told.immediate_response.status.code == 503
        (told,) = answers(channel, head(key="sk-wrong"), *body(WHOLE))
        assert told.immediate_response.status.code == 401


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    (tmp_path / "replicas.yaml").write_text(NOBODY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = sluice("pick", "--replicas", tmp_path / "replicas.yaml", "--port", str(port), "--admin-port", "off")
    assert asked.returncode == 1
    assert f"127.0.0.1:{port} cannot be bound: it is in use" in asked.stderr
