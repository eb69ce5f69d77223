"""A gateway that is killed and started again: nothing stays held, and what it spent is not forgotten."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.raw_client import completion
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually, running_server

POLICY = "tenants: {demo: {limits: {tokens: 1M/month, concurrent_requests: 5}}}"
NUM_STREAMS = 3


def stream_until_broken(server: ServerProcess, begun: threading.Barrier) -> None:
    body: dict[str, Any] = completion(stream=True, ignore_eos=True, max_tokens=1900)
    url = f"{server.url}/v1/completions"
    try:
        with httpx.stream("POST", url, json=body, headers=server.headers, timeout=PATIENCE) as reply:
            lines = reply.iter_lines()
            next(lines)
            begun.wait(PATIENCE)
            for _ in lines:
                pass
    except httpx.TransportError:
        return


def test_what_a_killed_gateway_held_in_its_own_store_is_free_again_after_its_lease(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    flags = ["--threads=1", f"--policy={policy}", "--quota-lease=3"]
    with running_server(tmp_path, *flags) as server:
        begun = threading.Barrier(NUM_STREAMS + 1)
        threads = [threading.Thread(target=stream_until_broken, args=(server, begun)) for _ in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE)
        assert server.remaining("concurrent_requests") == 5 - NUM_STREAMS
        os.kill(server.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    with running_server(tmp_path, *flags) as server:
        eventually(lambda: server.answers() and server.remaining("concurrent_requests") == 5)
        assert server.remaining("tokens") < 1_000_000, "what was computed before the kill is not forgotten"
