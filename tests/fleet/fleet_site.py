"""Real replicas behind a real router, each a process of its own; they share keys, policy and quota store."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from tests.gateway.server_process import PATIENCE, ServerProcess, bearer, eventually, running_server
from tests.gateway.tenant_site import make_keys
from tests.gateway.warm_interpreter import start


@dataclass
class FleetSite:
    folder: Path
    url: str  # of the router
    admin_url: str
    replicas: list[ServerProcess]
    keys: dict[str, str]  # by tenant

    @property
    def admin_headers(self) -> dict[str, str]:
        return self.replicas[0].admin_headers

    def client(self, tenant: str, url: str | None = None) -> openai.OpenAI:
        """The official client, which does not come back by itself."""
        url = f"{url or self.url}/v1"
        return openai.OpenAI(base_url=url, api_key=self.keys[tenant], max_retries=0, timeout=PATIENCE)

    def post(self, tenant: str, **body: Any) -> httpx.Response:
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=bearer(self.keys[tenant]), timeout=PATIENCE)

    def report(self) -> dict[str, dict[str, Any]]:
        """What the router says of each replica."""
        reply = httpx.get(f"{self.admin_url}/admin/v1/fleet", headers=self.admin_headers, timeout=PATIENCE)
        return {one["name"]: one for one in reply.json()["replicas"]}

    def attempts(self) -> list[int]:
        """How many the router has made at each replica."""
        report = self.report()
        return [report[one.url.removeprefix("http://")]["attempts"] for one in self.replicas]

    def available(self) -> int:
        return sum(one["available"] for one in self.report().values())

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.admin_url}/metrics", headers=self.admin_headers).text
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def write(self, replicas: list[ServerProcess]) -> None:
        """Have the router choose among these."""
        write_replicas(self.folder, replicas)

    def are_idle(self) -> bool:
        return all(one.is_idle() for one in self.replicas if one.process.poll() is None)


def write_replicas(folder: Path, replicas: list[ServerProcess]) -> Path:
    file = folder / "replicas.yaml"
    file.write_text(yaml.safe_dump({"replicas": [{"url": one.url, "admin": one.admin_url} for one in replicas]}))
    return file


@contextmanager
def fleet_site(
    folder: Path, policy: str, *flags: str, count: int = 2, route: tuple[str, ...] = ()
) -> Iterator[FleetSite]:
    """Run `count` replicas with these flags, and a router before them with its own, while the block runs. It is told of
    the replicas by a file unless its flags say otherwise.
    """
    file, state = folder / "policy.yaml", folder / "state"
    file.write_text(policy)
    keys = make_keys(state, *yaml.safe_load(policy)["tenants"])
    shared = ("--policy", str(file), "--state-dir", str(state))
    with ExitStack() as stack:

        def start(number: int) -> ServerProcess:
            own = folder / str(number)
            own.mkdir()
            return stack.enter_context(running_server(own, "--threads", "1", *shared, *flags))

        with ThreadPoolExecutor(count) as pool:
            replicas = [*pool.map(start, range(count))]
        ports = ("--port", "0", "--admin-port", "0")
        named = any(flag.startswith("--replicas") for flag in route)
        which = () if named else ("--replicas", str(write_replicas(folder, replicas)))
        command = ("route", *which, *route, *ports, *shared)
        url, admin_url = stack.enter_context(running_router(folder, *command))
        site = FleetSite(folder, url, admin_url, replicas, keys)
        eventually(lambda: site.available() == count)
        yield site


@contextmanager
def running_router(folder: Path, *arguments: str) -> Iterator[tuple[str, str]]:
    """Start one; yield its address and that of its admin port."""
    stdout, stderr = folder / "router.out", folder / "router.err"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = start("sluice", arguments, out, err)
    try:
        eventually(lambda: process.poll() is not None or b"  admin " in stdout.read_bytes())
        assert process.poll() is None, stderr.read_text()
        url, admin_url = re.findall(r"http://\S+", stdout.read_text())
        yield url, admin_url
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
