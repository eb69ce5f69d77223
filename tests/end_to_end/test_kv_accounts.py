"""On whose account KV memory is, as Prometheus, the admin page and the doctor of a live gateway are told."""

import random

from gateway.admin.kv_map import Use
from tests.gateway.server_process import eventually
from tests.gateway.telemetry.metrics_rig import Page
from tests.gateway.tenant_site import TenantSite, site_fixture

BLOCK = 16
POLICY = """
tenants:
  floored: {prefix_cache: {floor: 200KiB}}
  plain: {}
  without: {prefix_cache: {ceiling: 0B}}
"""


class Site(TenantSite):
    def ask(self, tenant: str, prompt: list[int]) -> int:
        """Returns how many tokens of the prompt were found."""
        with self.client(tenant) as client:
            extra = {"ignore_eos": True}
            reply = client.completions.create(model="embedded", prompt=prompt, max_tokens=1, extra_body=extra)
        eventually(self.server.is_idle)
        found: int = reply.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr,assignment]
        return found

    def page(self) -> Page:
        return Page(self.server.scrape().text)


site = site_fixture(Site, POLICY, "--kv-memory-bytes", "6MiB", "--max-model-len", "256")


def a_prompt(blocks: int) -> list[int]:
    """Token ids that no other prompt begins with: `blocks` blocks of them and one more."""
    return [random.randrange(5, 500) for _ in range(blocks * BLOCK + 1)]


def test_idle_memory_is_nobodys_but_for_what_a_floor_keeps(site: Site) -> None:
    site.ask("floored", a_prompt(8))
    site.ask("plain", a_prompt(8))
    size = site.server.admin("kv")["block_bytes"]
    page = site.page()
    assert page.value("sluice_kv_blocks_used") == page.value("sluice_kv_bytes") == 0
    assert page.value("sluice_kv_cached_bytes", tenant="plain") == 8 * size
    assert page.value("sluice_kv_cached_bytes", tenant="floored") == 8 * size
    kept = page.value("sluice_kv_kept_bytes", tenant="floored")
    assert kept == page.value("sluice_kv_charged_bytes") == size * -(-200 * 1024 // size)
    rows = {row["name"]: row for row in site.server.admin("tenants")["tenants"]}
    assert rows["floored"]["kv_charged_bytes"] == rows["floored"]["kv_kept_bytes"] == kept
    assert (rows["plain"]["kv_charged_bytes"], rows["plain"]["kv_cached_bytes"]) == (0, 8 * size)


def test_the_map_shows_whose_idle_blocks_were(site: Site) -> None:
    site.ask("plain", a_prompt(8))
    shown = site.server.admin("kv")
    idle = dict.fromkeys(shown["owners"], 0)
    for owner, blocks, use in shown["runs"]:
        if owner >= 0 and use == Use.CACHED:
            idle[shown["owners"][owner]] += blocks
    page = site.page()
    cached = {tenant: page.value("sluice_kv_cached_bytes", tenant=tenant) for tenant in idle}
    assert idle["plain"] >= 8
    assert {tenant: blocks * shown["block_bytes"] for tenant, blocks in idle.items()} == cached
    assert (
        sum(idle.values())
        == page.value("sluice_kv_blocks_cached")
        == site.server.admin("overview")["engine"]["kv_blocks_cached"]
    )


def test_a_ceiling_is_of_what_stays_and_an_edit_of_it_holds_at_once(site: Site) -> None:
    prompt = a_prompt(6)
    assert [site.ask("without", prompt) for _ in range(2)] == [0, 0]
    site.edit(POLICY.replace("ceiling: 0B", "ceiling: 1MiB"))
    assert [site.ask("without", prompt) for _ in range(2)] == [0, 6 * BLOCK]
    site.edit(POLICY)
    assert site.ask("without", prompt) == 0
