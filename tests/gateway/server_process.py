"""A real `sluice serve` in a process of its own, and how tests look at it from outside."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds until something that must happen counts as not happening


@dataclass(frozen=True)
class ServerProcess:
    """A gateway that has announced itself on a port of its own choice."""

    process: subprocess.Popen[bytes]
    port: int
    key: str
    announcement: str
    log: Path  # everything it said on stderr

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, or of those with a label such as outcome="failed"."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = re.findall(rf"^{re.escape(name)}\{{.*{re.escape(label)}.*\}} (\S+)$", text, re.MULTILINE)
        assert samples, f"no metric {name}"
        return sum(map(float, samples))

    def is_idle(self) -> bool:
        """No request is queued or running and every KV block is free."""
        return not any(map(self.metric, ("vllm:num_requests_running", "vllm:num_requests_waiting"))) and (
            self.metric("sluice:kv_blocks_used") == 0
        )

    def answers(self) -> bool:
        """It still does what it is for."""
        body = {
            "model": "embedded",
            "temperature": 0,
            "messages": [{"role": "user", "content": "Count from 3 to 12."}],
        }
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers, timeout=PATIENCE)
        text: str = reply.json()["choices"][0]["message"]["content"]
        return reply.status_code == 200 and "10, 11, 12" in text


@contextmanager
def running_server(directory: Path, *flags: str) -> Iterator[ServerProcess]:
    """Start one with its state and its output in `directory`; it is stopped, and must stop, at the end."""
    stdout, stderr = directory / "stdout", directory / "stderr"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--state-dir", str(directory / "state")]
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, stdout=out, stderr=err)
    try:
        eventually(lambda: process.poll() is not None or b"curl " in stdout.read_bytes())
        announcement = stdout.read_text()
        assert process.poll() is None, stderr.read_text()
        address = re.search(r" is ready at https?://[^:]+:(\d+)$", announcement, re.MULTILINE)
        key = re.search(r"Bearer (\S+?)'", announcement)
        assert address
        assert key
        yield ServerProcess(process, int(address[1]), key[1], announcement, stderr)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def eventually(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait until it holds; fail when it does not within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def assert_unharmed(server: ServerProcess, *secrets: str) -> None:
    """A right answer, no request left, no error of its own, and nothing of keys or `secrets` in what it logged."""
    assert server.answers()
    eventually(server.is_idle)
    log = server.log.read_text()
    for unwanted in (server.key, "sk-", "Traceback", "ERROR", *secrets):
        assert unwanted not in log
