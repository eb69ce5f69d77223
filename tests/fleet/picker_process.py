"""`sluice pick` as a process, and what a gateway asks it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from backend.bound_process import bound
from fleet.ext_proc.messages import HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse
from fleet.ext_proc.server import EXT_PROC, HEALTH
from tests.gateway.server_process import PATIENCE, ROOT


@contextmanager
def running_picker(folder: Path, *flags: str) -> Iterator[grpc.Channel]:
    """Run one for the replicas of a folder's `replicas.yaml`; it ends well at the end."""
    command = [sys.executable, "-m", "sluice", "pick", "--replicas", str(folder / "replicas.yaml"), *flags]
    errors = folder / "picker.err"
    with errors.open("wb") as err:
        process = subprocess.Popen(
            **bound([*command, "--port", "0", "--admin-port", "off"]), cwd=ROOT, stdout=subprocess.PIPE, stderr=err
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode().strip()
        assert " picks endpoints at grpc://127.0.0.1:" in line, errors.read_text()
        with grpc.insecure_channel(line.rpartition("//")[2]) as channel:
            yield channel
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def health(channel: grpc.Channel, service: str) -> int:
    check = channel.unary_unary(
        f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    status: int = check(HealthCheckRequest(service=service), timeout=PATIENCE).status
    return status


def answers(channel: grpc.Channel, *messages: Any) -> list[Any]:
    """What a picker answers to the messages of one exchange."""
    process = channel.stream_stream(
        f"/{EXT_PROC}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
    )
    return [*process(iter(messages), timeout=PATIENCE)]
