"""A real `sluice serve` in a process of its own, and how tests look at it from outside."""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx

from tests.gateway.warm_interpreter import ServerHandle, start

BODY: dict[str, Any] = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}]}
ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds until something that must happen counts as not happening


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class ServerProcess:
    """A gateway that has announced itself on a port of its own choice."""

    process: ServerHandle
    port: int
    key: str
    announcement: str
    log: Path  # everything it said on stderr
    admin_port: int  # 0: none
    admin_key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.key)

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def admin_headers(self) -> dict[str, str]:
        return bearer(self.admin_key)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=bearer(key or self.key), timeout=PATIENCE)

    def post(self, path: str, /, *, key: str | None = None, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=bearer(key or self.key), timeout=PATIENCE)

    def stream(self, path: str, /, **body: object) -> AbstractContextManager[httpx.Response]:
        body |= {"stream": True}
        return httpx.stream("POST", f"{self.url}{path}", json=body, headers=self.headers, timeout=PATIENCE)

    def remaining(self, resource: str) -> int:
        """What is left of the key's limit of a resource."""
        entries = self.get("/v1/limits").json()["data"]
        return int(next(entry["remaining"] for entry in entries if entry["resource"] == resource))

    def ask_admin(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        url = f"{self.admin_url}/admin/v1/{path}"
        return httpx.request(method, url, headers=self.admin_headers, timeout=PATIENCE, **options)

    def admin(self, path: str, method: str = "GET") -> Any:
        reply = self.ask_admin(path, method)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def scrape(self) -> httpx.Response:
        """What Prometheus reads, on the admin port."""
        return httpx.get(f"{self.admin_url}/metrics", headers=self.admin_headers)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, or of those with a label such as outcome="failed", which may have none yet."""
        text = self.scrape().text
        samples = re.findall(rf"^{re.escape(name)}\{{.*{re.escape(label)}.*\}} (\S+)$", text, re.MULTILINE)
        assert samples or f"# TYPE {name} " in text, f"no metric {name}"
        return sum(map(float, samples))

    def is_idle(self) -> bool:
        """No request is being served, each that was has been counted, and every KV block is free."""
        gauges = "sluice_live_requests|vllm:num_requests_running|vllm:num_requests_waiting|sluice_kv_blocks_used"
        samples = re.findall(rf"^(?:{gauges})\{{.*\}} (\S+)$", self.scrape().text, re.MULTILINE)
        return len(samples) == 4 and not any(map(float, samples))

    def answers(self) -> bool:
        """It still does what it is for."""
        reply = self.post("/v1/chat/completions", temperature=0, **BODY)
        text: str = reply.json()["choices"][0]["message"]["content"]
        return reply.status_code == 200 and "10, 11, 12" in text


@contextmanager
def running_server(directory: Path, *flags: str, program: str = "sluice", warm: bool = True) -> Iterator[ServerProcess]:
    """Start one with its state and its output in `directory`; it is stopped, and must stop, at the end.

    `program` is a module that runs as `sluice` does. Unless it is another or `warm` is false, the process is forked
    from one that has imported what it needs.
    """
    stdout, stderr = directory / "stdout", directory / "stderr"
    command = ["serve", "--port", "0", "--admin-port", "0"]
    command += ["--state-dir", str(directory / "state"), "--http-workers", "0"]  # for any number of cores
    command += ["--calibration", "off"]  # it takes a second
    command += ["--drain-timeout", "120"]  # on a busy machine an answer takes longer than 30 s to end
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = start(program, [*command, *flags], out, err, warm=warm)
    try:
        eventually(lambda: process.poll() is not None or b"curl " in stdout.read_bytes())
        announcement = stdout.read_text()
        assert process.poll() is None, stderr.read_text()
        address = re.search(r" is ready at https?://[^:]+:(\d+)$", announcement, re.MULTILINE)
        key = re.search(r"Bearer (\S+?)'", announcement)
        admin = re.search(r"^  admin     https?://[^:]+:(\d+), its key in (.+)$", announcement, re.MULTILINE)
        assert address
        assert key
        admin_port, admin_key = (int(admin[1]), _read(Path(admin[2]))) if admin else (0, "")
        yield ServerProcess(process, int(address[1]), key[1], announcement, stderr, admin_port, admin_key)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _read(path: Path) -> str:
    """The key, where it is in a file; an environment variable's is not known here."""
    return path.read_text().strip() if path.is_file() else ""


def eventually(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait until it holds; fail when it does not within `patience` seconds. Looks less often the longer it takes."""
    deadline, pause = time.monotonic() + patience, 0.01
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.2)


@contextmanager
def in_threads(*calls: Callable[[], object]) -> Iterator[None]:
    """Each call runs in a thread beside the block, which ends when they have."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def sluice(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Runs the command to its end."""
    words = [*map(str, arguments)]
    with TemporaryFile("w+b") as out, TemporaryFile("w+b") as err:
        status = start("sluice", words, out, err).wait(PATIENCE)
        printed = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return subprocess.CompletedProcess(["sluice", *words], status, *printed)


def assert_unharmed(server: ServerProcess, *secrets: str) -> None:
    """A right answer, no request left, no error of its own, and nothing of keys or `secrets` in what it logged."""
    assert server.answers()
    eventually(server.is_idle)
    log = server.log.read_text()
    for unwanted in (server.key, "sk-", "Traceback", "ERROR", *secrets):
        assert unwanted not in log
