"""System prompts that a policy pins, as their tenants, other tenants, an operator and the ledger see them."""

import random

import pytest

from tests.gateway.server_process import eventually, sluice
from tests.gateway.telemetry.metrics_rig import Page
from tests.gateway.tenant_site import TenantSite, site_fixture

BLOCK = 16
SYSTEM = "You answer in few words, and count from 3 to 9 where you are asked to. " * 3
TENANTS = """
tenants:
  pinning: {{prefix_cache: {{pinned: ['{system}']}}}}
  twin: {{prefix_cache: {{pinned: ['{system}']}}}}
  leased: {{limits: {{kv_bytes: 1MiB}}, prefix_cache: {{pinned: ['{system}']}}}}
  plain: {{}}
  stranger: {{}}
  crowd: {{}}
"""
POLICY = TENANTS.format(system=SYSTEM)
UNPINNED = TENANTS.format(system="Another prompt that nobody has, and that is of some length.")


class Site(TenantSite):
    def ask(self, tenant: str, system: str = SYSTEM, salt: str | None = None) -> int:
        """Have a new conversation; returns how many tokens of its beginning were found."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{random.getrandbits(64):x}"}]
        extra = {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        reply = self.post(tenant, messages=messages, max_tokens=1, **extra).json()
        found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def kv_memory(self, tenant: str) -> dict[str, int | None]:
        """What GET /v1/limits says of it, in bytes."""
        said: dict[str, int | None] = self.get(tenant).json()["kv_memory"]
        return {name.removesuffix("_bytes"): number for name, number in said.items()}

    def flood(self) -> None:
        """Fill the KV memory with what one tenant says, several times."""
        before = self.page().value("sluice_prefix_cache_evictions_total")
        while self.page().value("sluice_prefix_cache_evictions_total") < before + 2 * self.num_blocks:
            self.ask("crowd", f"{random.random()} " * 20)

    def page(self) -> Page:
        return Page(self.server.scrape().text)

    @property
    def num_blocks(self) -> float:
        return self.page().value("sluice_kv_blocks")


site = site_fixture(
    Site, POLICY, "--kv-memory-bytes", "6MiB", "--max-model-len", "512", "--refused-per-second", "10000"
)


def test_a_pinned_prompt_is_found_however_much_others_cached_since_and_is_charged_to_its_tenant(site: Site) -> None:
    assert site.ask("pinning") == 0, "nothing is computed ahead"
    found = site.ask("pinning")
    assert found >= 4 * BLOCK
    assert site.ask("plain") == 0, "others find nothing of it"
    site.flood()
    assert (site.ask("pinning"), site.ask("plain")) == (found, 0)
    eventually(site.server.is_idle)
    page, size = site.page(), site.server.admin("kv")["block_bytes"]
    kept = found // BLOCK * size
    assert site.kv_memory("pinning") == {"held": 0, "kept": kept, "leased": None, "limit": None, "remaining": None}
    pinned = page.value("sluice_kv_pinned_bytes", tenant="pinning")
    assert pinned == page.value("sluice_kv_charged_bytes", tenant="pinning") == found // BLOCK * size
    assert page.value("sluice_kv_bytes") == 0
    (row,) = [row for row in site.server.admin("tenants")["tenants"] if row["name"] == "pinning"]
    assert (row["kv_pinned_bytes"], row["pinned_blocks"] * size) == (pinned, pinned) and row["pinned_reuses"] > 0


def test_tenants_that_pin_the_same_find_nothing_of_each_other(site: Site) -> None:
    found = [site.ask("pinning") for _ in range(2)][1]
    assert [site.ask("twin") for _ in range(2)] == [0, found]
    assert [site.ask("stranger") for _ in range(2)] == [0, found]
    assert [site.ask("pinning", salt="of a user") for _ in range(2)] == [0, found], "a salt can only narrow"


def test_an_edit_pins_what_is_cached_and_lets_go_of_what_it_does_not_name(site: Site) -> None:
    found = [site.ask("pinning") for _ in range(2)][1]
    site.edit(UNPINNED)
    eventually(lambda: site.page().value("sluice_kv_pinned_bytes") == 0)
    assert site.ask("pinning") == found, "it is cached until others need the memory"
    site.edit(POLICY)
    eventually(lambda: site.page().value("sluice_kv_pinned_bytes", tenant="pinning") > 0)
    site.flood()
    assert site.ask("pinning") == found
    site.edit(UNPINNED)
    eventually(lambda: site.page().value("sluice_kv_pinned_bytes") == 0)
    site.flood()
    assert site.ask("pinning") == 0
    site.edit(POLICY)


def test_a_pin_is_within_its_tenants_limit_and_keeps_none_of_its_requests_from_running(site: Site) -> None:
    found = [site.ask("leased") for _ in range(2)][1]
    assert found > 0
    assert site.ask("leased", "One " * 50) == 0
    eventually(site.server.is_idle)
    assert site.page().value("sluice_kv_charged_bytes", tenant="leased") <= 2**20
    site.ask("leased")
    assert site.ask("leased") == found
    eventually(site.server.is_idle)
    said = site.kv_memory("leased")
    assert (said["held"], said["limit"], said["remaining"]) == (0, 2**20, 2**20)
    assert 0 < (said["kept"] or 0) <= (said["leased"] or 0) <= 2**20


def test_pinned_blocks_are_on_the_bill_of_their_tenant(site: Site) -> None:
    site.ask("twin")
    eventually(site.server.is_idle)
    name = "sluice_kv_byte_seconds_total"
    before = site.page().value(name, tenant="twin")
    eventually(lambda: site.page().value(name, tenant="twin") > before)

    def booked() -> bool:
        done = sluice("usage", "--tenant", "twin", "--by", "key", "--csv", "--state-dir", site.store.directory)
        rows = [line.split(",") for line in done.stdout.splitlines()[1:]]
        return any(row[2] == "" and int(row[3]) == 0 and float(row[8]) > 0 for row in rows)

    eventually(booked)


@pytest.mark.parametrize(
    ("system", "said"),
    [("Short.", "fills no block of 16 tokens"), ("word " * 9000, "system prompts take")],
)
def test_an_edit_that_pins_what_cannot_stay_is_refused_at_its_place(site: Site, system: str, said: str) -> None:
    version = site.version
    site.policy.write_text(f"tenants:\n  pinning: {{prefix_cache: {{pinned: ['{system}']}}}}\n")
    eventually(lambda: site.server.admin("policy")["problem"])
    problem = site.server.admin("policy")["problem"]
    assert ":2:" in problem and "tenants.pinning.prefix_cache.pinned: " in problem and said in problem
    assert site.version == version
    site.policy.write_text(POLICY)
    eventually(lambda: not site.server.admin("policy")["problem"])
