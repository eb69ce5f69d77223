"""A tenant that tries to find in the prefix cache what others have sent: by salts, while policies change, after its key
was revoked.
"""

import random
from typing import Any

import httpx
import openai
import pytest

from gateway.tenants.auth import new_key
from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import PATIENCE, bearer, eventually
from tests.gateway.tenant_site import TenantSite, site_fixture

GROUP = "\nprefix_sharing: {family: [acme, acme-eu]}\n"
TENANTS = "tenants: {acme: {}, acme-eu: {}, victim: {}, attacker: {}}"
LENGTH, FOUND = 100, 96


class Site(TenantSite):
    def send(self, key: str, prompt: list[int], **fields: Any) -> httpx.Response:
        body = {"model": "embedded", "prompt": prompt, "max_tokens": 2, "ignore_eos": True} | fields
        return httpx.post(f"{self.server.url}/v1/completions", json=body, headers=bearer(key), timeout=PATIENCE)

    def cached(self, tenant: str, prompt: list[int], **fields: Any) -> int:
        """The prompt tokens that were found."""
        reply = self.send(self.keys[tenant], prompt, **fields)
        assert reply.status_code == 200, reply.text
        found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found


site = site_fixture(Site, TENANTS + GROUP, "--refused-per-second", "10000", workers=NUMBERS_OF_WORKERS)


def a_prompt() -> list[int]:
    return [random.randrange(5, 500) for _ in range(LENGTH)]


@pytest.mark.parametrize(
    "salt", ["victim", "tenant:victim", "tenant:attacker", "attacker", "\0", "é" * 256, "\U0001f98a" * 256]
)
def test_no_salt_finds_what_another_tenant_cached_nor_what_was_cached_without_it(site: Site, salt: str) -> None:
    prompt = a_prompt()
    assert [site.cached("victim", prompt), site.cached("victim", prompt, cache_salt=salt)] == [0, 0]
    assert site.cached("attacker", prompt, cache_salt=salt) == 0
    assert [site.cached("attacker", prompt), site.cached("attacker", prompt)] == [0, FOUND]
    assert site.cached("attacker", prompt, cache_salt=salt) == FOUND


def test_salts_that_look_alike_are_two(site: Site) -> None:
    prompt = a_prompt()
    assert [site.cached("victim", prompt, cache_salt=salt) for salt in ("\u00e9", "e\u0301", "\u00c9")] == [0, 0, 0]
    assert site.cached("victim", prompt, cache_salt="\u00e9") == FOUND


def test_blocks_computed_by_a_member_that_leaves_its_group_are_not_hit_there(site: Site) -> None:
    """A request belongs to the group that it arrived in; a tenant alone finds a new one."""
    prompt = a_prompt()
    with site.client("acme-eu") as client:
        stream = client.completions.create(
            model="embedded", prompt=prompt, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        assert isinstance(stream, openai.Stream)
        next(stream)
        site.edit(TENANTS + "\nprefix_sharing: {family: [acme, victim]}\n")
        for tenant in ("acme", "acme-eu"):
            assert site.cached(tenant, prompt) == 0
        assert sum(1 for _ in stream) >= 1, "it is served to its end"
    assert site.cached("victim", prompt) == FOUND, "what acme sent since"
    site.edit(TENANTS + GROUP)


def test_a_revoked_key_finds_nothing_any_more_and_another_of_its_tenant_does(site: Site) -> None:
    prompt = a_prompt()
    key, record = new_key("victim", site.store.pepper())
    site.store.add(record)
    eventually(lambda: site.send(key, [5, 6, 7]).status_code == 200)
    site.send(key, prompt)
    site.store.remove(record.id)
    eventually(lambda: site.send(key, [5, 6, 7]).status_code == 401)
    assert "usage" not in site.send(key, prompt).json()
    assert [site.cached("attacker", prompt), site.cached("victim", prompt)] == [0, FOUND]
