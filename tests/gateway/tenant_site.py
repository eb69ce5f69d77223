"""A real server with a policy, and a key for each tenant that the policy names."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import yaml

from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from tests.gateway.server_process import BODY, PATIENCE, ServerProcess, bearer, eventually, running_server

PAIRS = 126  # of an id of another tenant and an unknown one, for each call


@dataclass
class TenantSite:
    server: ServerProcess
    policy: Path
    keys: dict[str, str]  # by tenant
    store: KeyStore

    def authorization(self, tenant: str) -> dict[str, str]:
        return bearer(self.keys[tenant])

    def get(self, tenant: str, path: str = "/v1/limits", **headers: str) -> httpx.Response:
        return httpx.get(self.server.url + path, headers=self.authorization(tenant) | headers, timeout=PATIENCE)

    def post(self, tenant: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        url, own = f"{self.server.url}/v1/chat/completions", self.authorization(tenant) | (headers or {})
        return httpx.post(url, json=BODY | body, headers=own, timeout=PATIENCE)

    def limits(self, tenant: str) -> dict[str, Any]:
        """By resource."""
        return {entry["resource"]: entry for entry in self.get(tenant).json()["data"]}

    def client(self, tenant: str, **options: Any) -> openai.OpenAI:
        """The official client, which does not come back unless it is told to."""
        given: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE} | options
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.keys[tenant], **given)

    def check_alike(self, tenant: str, calls: Sequence[tuple[str, str]], foreign: str, unknown: str) -> None:
        """Ask `PAIRS` times about two ids, by each method and path. Both are answered as missing, and of each call's
        pairs the foreign one is the slower about as often as not: a sign test at 5 sigma.
        """
        headers, url = self.authorization(tenant), self.server.url
        with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as asking:
            for method, path in calls:
                num_slower = 0
                for turn in range(PAIRS):
                    took = {}
                    for name in (foreign, unknown) if turn % 2 else (unknown, foreign):
                        began = time.perf_counter()
                        assert asking.request(method, path.format(name)).status_code == 404
                        took[name] = time.perf_counter() - began
                    num_slower += took[foreign] > took[unknown]
                assert abs(num_slower - PAIRS / 2) < 5 * PAIRS**0.5 / 2, f"{method} {path}"

    def edit(self, policy: str) -> None:
        """Have another policy hold, for every request from now on."""
        before = self.version
        self.policy.write_text(policy)
        eventually(lambda: self.version != before)

    @property
    def version(self) -> Any:
        """Of the policy that holds now."""
        return self.server.get("/readyz").json()["policy"]["version"]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


Site = TypeVar("Site", bound=TenantSite)


@contextmanager
def tenant_site(kind: type[Site], folder: Path, policy: str, *flags: str) -> Iterator[Site]:
    """Serve `policy` with a new key for each of its tenants while the block runs."""
    file = folder / "policy.yaml"
    file.write_text(policy)
    keys = make_keys(folder / "state", *yaml.safe_load(policy)["tenants"])
    with running_server(folder, "--threads", "1", "--policy", str(file), *flags) as server:
        yield kind(server, file, keys, KeyStore(folder / "state"))


def site_fixture(
    kind: type[Site], policy: str, *flags: str, workers: Sequence[Any] = (pytest.param(0, id=pytest.HIDDEN_PARAM),)
) -> Any:
    """A module's fixture of `tenant_site`; for each of `workers`, with as many HTTP workers."""

    @pytest.fixture(scope="module", params=workers)
    def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        own = ("--http-workers", str(request.param))
        with tenant_site(kind, tmp_path_factory.mktemp("site"), policy, *flags, *own) as site:
            yield site

    return site


def make_keys(state_dir: Path, *tenants: str) -> dict[str, str]:
    store, keys = KeyStore(state_dir), {}
    for tenant in tenants:
        keys[tenant], record = new_key(tenant, store.pepper())
        store.add(record)
    return keys
