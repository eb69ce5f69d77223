"""One tenant with every reason to misbehave beside another, on one server: nothing crosses."""

import secrets
from collections.abc import Iterator

import httpx
import pytest

from gateway.errors import InvalidApiKey
from gateway.tenants.auth import KeyRing, new_key
from tests.gateway.server_process import PATIENCE, assert_unharmed
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
tenants:
  mallory: {limits: {requests: {rate: 3/h, burst: 3}, tokens: 100k/h}}
  victim: {limits: {requests: 1k/h, tokens: 100k/h}}
"""


class Site(TenantSite):
    def post(self, tenant: str, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        short = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
        return super().post(tenant, headers, **short | body)

    def left(self, tenant: str) -> dict[str, int]:
        return {entry["resource"]: entry["remaining"] for entry in self.get(tenant).json()["data"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    flags = ("--refused-per-second", "10000")
    with tenant_site(Site, tmp_path_factory.mktemp("malicious"), POLICY, *flags) as site:
        yield site


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
