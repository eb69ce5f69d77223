"""The calendar jumps under a gateway that serves: what runs goes on, limits and deadlines are counted as before."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.gateway.raw_client import completion
from tests.gateway.server_process import PATIENCE, eventually, running_server

POLICY = "tenants: {demo: {limits: {requests: {rate: 10/h, burst: 6}, concurrent_requests: 4}}}"


def test_a_jump_back_and_one_forward_change_nothing_for_clients(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    flags = ["--threads=1", f"--policy={policy}"]
    with (
        running_server(tmp_path, *flags, program="tests.gateway.jumping_server") as server,
        httpx.Client(base_url=server.url, headers=server.headers, timeout=PATIENCE) as client,
    ):

        def ask() -> httpx.Response:
            deadline = {"x-sluice-deadline-ms": "30000"}
            return client.post("/v1/completions", json=completion(), headers=deadline)

        def limits() -> dict[str, int]:
            entries = client.get("/v1/limits").json()["data"]
            return {entry["resource"]: entry["remaining"] for entry in entries}

        created = [ask().json()["created"]]
        body = completion(stream=True, ignore_eos=True, max_tokens=1500)
        with client.stream("POST", "/v1/completions", json=body) as reply:
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
