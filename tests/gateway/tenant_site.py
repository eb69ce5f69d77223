"""A real server with a policy, and a key for each tenant that the policy names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from tests.gateway.server_process import PATIENCE, ServerProcess, running_server


@dataclass
class TenantSite:
    server: ServerProcess
    policy: Path
    keys: dict[str, str]  # by tenant
    store: KeyStore

    def authorization(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def get(self, tenant: str, path: str = "/v1/limits", **headers: str) -> httpx.Response:
        return httpx.get(self.server.url + path, headers=self.authorization(tenant) | headers, timeout=PATIENCE)

    def post(self, tenant: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """Ask for a chat completion."""
        content = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}]} | body
        url, own = f"{self.server.url}/v1/chat/completions", self.authorization(tenant) | (headers or {})
        return httpx.post(url, json=content, headers=own, timeout=PATIENCE)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


Site = TypeVar("Site", bound=TenantSite)


@contextmanager
def tenant_site(kind: type[Site], folder: Path, policy: str, *flags: str) -> Iterator[Site]:
    """Serve `policy` with a new key for each of its tenants while the block runs."""
    file, store, keys = folder / "policy.yaml", KeyStore(folder / "state"), {}
    file.write_text(policy)
    for tenant in yaml.safe_load(policy)["tenants"]:
        keys[tenant], record = new_key(tenant, store.pepper())
        store.add(record)
    with running_server(folder, "--threads", "1", "--policy", str(file), *flags) as server:
        yield kind(server, file, keys, store)
