"""One tenant with every reason to misbehave beside another, on one server: nothing crosses."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gateway.errors import InvalidApiKey
from gateway.tenants.auth import KeyRing, new_key
from gateway.tenants.key_store import KeyStore
from tests.gateway.server_process import PATIENCE, ServerProcess, assert_unharmed, running_server

POLICY = """
tenants:
  mallory: {limits: {requests: {rate: 3/h, burst: 3}, tokens: 100k/h}}
  victim: {limits: {requests: 1k/h, tokens: 100k/h}}
"""


@dataclass
class Site:
    server: ServerProcess
    keys: dict[str, str]

    def get(self, tenant: str, path: str = "/v1/limits", **headers: str) -> httpx.Response:
        own = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.get(self.server.url + path, headers=own | headers, timeout=PATIENCE)

    def post(self, tenant: str, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        content = {"model": "embedded", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1} | body
        own = {"authorization": f"Bearer {self.keys[tenant]}"} | (headers or {})
        return httpx.post(f"{self.server.url}/v1/chat/completions", json=content, headers=own, timeout=PATIENCE)

    def left(self, tenant: str) -> dict[str, int]:
        return {entry["resource"]: entry["remaining"] for entry in self.get(tenant).json()["data"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("malicious")
    (folder / "policy.yaml").write_text(POLICY)
    store, keys = KeyStore(folder / "state"), {}
    for tenant in ("mallory", "victim"):
        keys[tenant], record = new_key(tenant, store.pepper())
        store.add(record)
    with running_server(
        folder, "--threads", "1", "--refused-per-second", "10000", "--policy", str(folder / "policy.yaml")
    ) as server:
        yield Site(server, keys)


FORGED = [
    {"x-sluice-tenant": "victim"},
    {"x-tenant": "victim", "x-tenant-id": "victim", "x-user": "victim"},
    {"openai-organization": "victim", "openai-project": "victim"},
    {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "x-real-ip": "127.0.0.1"},
    {"x-sluice-priority": "0", "x-priority": "-1", "x-sluice-class": "interactive"},
    {"date": "Thu, 01 Jan 2099 00:00:00 GMT", "x-sluice-now": "4102444800"},
]


def test_what_a_tenant_claims_to_be_charges_nobody_else(site: Site) -> None:
    before = site.left("victim")
    for headers in FORGED[:3]:
        assert site.post("mallory", headers, user="victim").status_code == 200
    for headers in FORGED:
        assert site.post("mallory", headers, user="victim").status_code == 429
    assert site.left("victim") == before


def test_a_tenant_sees_nothing_of_another(site: Site) -> None:
    own = site.get("mallory", "/v1/limits?tenant=victim", **FORGED[0])
    assert own.json()["tenant"] == "mallory" and "victim" not in own.text
    for path in ("/v1/limits/victim", "/v1/tenants", "/v1/usage", "/admin", "/v1/keys"):
        assert site.get("mallory", path).status_code == 404


def test_a_key_with_the_id_of_another_opens_nothing(site: Site) -> None:
    prefix, _, _ = site.keys["victim"].rpartition("-")
    _, _, own_secret = site.keys["mallory"].rpartition("-")
    guesses = [f"{prefix}-{own_secret}", f"{prefix}-{secrets.token_hex(20)}", prefix, f"{prefix}-", f"{prefix}-%00"]
    for guess in guesses:
        site.keys["guess"] = guess
        assert site.post("guess").status_code == 401
    assert site.post("victim").status_code == 200


def test_a_hundred_thousand_guessed_keys_leave_nothing_in_memory() -> None:
    key, record = new_key("acme", b"p" * 32)
    ring = KeyRing(b"p" * 32, [record])
    for number in range(100_000):
        with pytest.raises(InvalidApiKey):
            ring.authenticate(b"Bearer sk-sluice-%08x-%040x" % (number, number))
    assert len(ring) == 1
    assert ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"


def test_a_server_that_was_guessed_at_is_unharmed(site: Site) -> None:
    with httpx.Client(timeout=PATIENCE) as client:
        for number in range(300):
            headers = {"authorization": f"Bearer sk-sluice-{number:08x}-{secrets.token_hex(20)}"}
            assert client.get(f"{site.server.url}/v1/limits", headers=headers).status_code == 401
    assert set(site.left("victim")) == {"requests", "tokens"}
    assert_unharmed(site.server)
