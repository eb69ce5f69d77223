"""What a policy says of cached prefixes, and an edit of it while serving, as tenants find it."""

import random

from tests.gateway.tenant_site import TenantSite, site_fixture

BLOCK = 16
GROUP = "\nprefix_sharing: {family: [acme, acme-eu, other]}\n"
SMALLER = "\nprefix_sharing: {family: [acme, other]}\n"
TENANTS = """
tenants:
  acme: {}
  acme-eu: {}
  other: {}
  floored: {prefix_cache: {floor: 512KiB}}
  plain: {}
  crowd: {}
  without: {prefix_cache: {ceiling: 0B}}
"""


class Site(TenantSite):
    def cached(self, tenant: str, prompt: list[int]) -> int:
        """The prompt tokens that were found."""
        extra = {"ignore_eos": True}
        with self.client(tenant) as client:
            reply = client.completions.create(model="embedded", prompt=prompt, max_tokens=1, extra_body=extra)
        found: int = reply.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr,assignment]
        return found


site = site_fixture(
    Site, TENANTS + GROUP, "--kv-memory-bytes", "6MiB", "--max-model-len", "256", "--refused-per-second", "10000"
)


def a_prompt() -> list[int]:
    """Token ids that no other prompt begins with, six blocks of them and some more."""
    return [random.randrange(5, 500) for _ in range(6 * BLOCK + 3)]


FOUND = 6 * BLOCK


def test_after_a_tenant_left_a_group_neither_side_finds_earlier_prefixes(site: Site) -> None:
    prompt, later = a_prompt(), a_prompt()
    assert [site.cached(tenant, prompt) for tenant in ("acme", "acme-eu")] == [0, FOUND]
    site.edit(TENANTS + SMALLER)
    assert [site.cached(tenant, prompt) for tenant in ("acme-eu", "acme", "other")] == [0, 0, FOUND]
    assert [site.cached(tenant, later) for tenant in ("acme", "acme-eu", "other")] == [0, 0, FOUND]
    site.edit(TENANTS + GROUP)


def test_only_blocks_under_the_floor_are_hit_after_others_have_cached_more(site: Site) -> None:
    kept, not_kept = a_prompt(), a_prompt()
    assert [site.cached("floored", kept), site.cached("plain", not_kept)] == [0, 0]
    for _ in range(60):
        site.cached("crowd", a_prompt())
    assert [site.cached("floored", kept), site.cached("plain", not_kept)] == [FOUND, 0]


def test_a_ceiling_is_of_what_stays_and_an_edit_of_it_holds_at_once(site: Site) -> None:
    prompt = a_prompt()
    assert [site.cached("without", prompt) for _ in range(2)] == [0, 0]
    site.edit(TENANTS.replace("ceiling: 0B", "ceiling: 1MiB") + GROUP)
    assert [site.cached("without", prompt) for _ in range(2)] == [0, FOUND]
    site.edit(TENANTS + GROUP)
    assert site.cached("without", prompt) == 0
