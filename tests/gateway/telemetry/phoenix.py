"""Arize Phoenix, a real backend for traces, in a process of its own: https://pypi.org/project/arize-phoenix/.

It has too many dependencies to be installed with ours. `scripts/check_phoenix.py` installs it apart and runs the tests
that need it.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from backend.bound_process import bound
from tests.gateway.server_process import eventually
from tests.gateway.telemetry.trace_tree import SpanSeen
from tests.ports import free_port

VARIABLE = "SLUICE_TEST_PHOENIX"  # the path of its executable, where it is not on the path
PATIENCE = 120.0  # seconds until it serves: it makes its database first


@dataclass(frozen=True)
class Phoenix:
    http_port: int
    grpc_port: int

    def endpoint(self, protocol: str) -> str:
        return f"http://127.0.0.1:{self.grpc_port if protocol == 'grpc' else self.http_port}"

    def spans(self) -> list[SpanSeen]:
        """All it has, as its REST API tells of them."""
        url = f"{self.endpoint('http')}/v1/projects/default/spans"
        reply = httpx.get(url, params={"limit": 1000}, timeout=PATIENCE)
        return [] if reply.status_code == 404 else [_seen(span) for span in reply.json()["data"]]

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.endpoint('http')}/healthz").status_code == 200
        except httpx.TransportError:
            return False


def executable() -> str | None:
    """None: there is none here."""
    return os.environ.get(VARIABLE) or shutil.which("phoenix")


@contextmanager
def running_phoenix(command: str, directory: Path) -> Iterator[Phoenix]:
    """It keeps its data in `directory`, and reports nowhere."""
    phoenix = Phoenix(free_port(), free_port())
    environment = os.environ | {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(phoenix.http_port),
        "PHOENIX_GRPC_PORT": str(phoenix.grpc_port),
        "PHOENIX_WORKING_DIR": str(directory),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(**bound([command, "serve"]), env=environment, stdout=log, stderr=log)
    try:
        eventually(lambda: process.poll() is not None or phoenix.is_ready(), PATIENCE)
        assert process.poll() is None, (directory / "log").read_text()
        yield phoenix
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _seen(span: dict[str, Any]) -> SpanSeen:
    return SpanSeen(
        span["context"]["trace_id"],
        span["context"]["span_id"],
        span["parent_id"],
        span["name"],
        datetime.fromisoformat(span["start_time"]).timestamp(),
        datetime.fromisoformat(span["end_time"]).timestamp(),
        span["attributes"],
        [event["name"] for event in span["events"]],
    )
