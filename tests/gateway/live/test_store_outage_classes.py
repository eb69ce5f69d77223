"""A quota store that answers nobody: each class is served, or refused, as the policy of its tenant says."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.server_process import eventually
from tests.gateway.stoppable_store import StoppableStore
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
classes:
  interactive: {service_tiers: [priority]}
  batch: {aging: 8s, service_tiers: [flex]}
defaults: {limits: {tokens: 1000000/month}}
tenants:
  paying: {default_class: interactive, on_store_outage: open}
  bridged: {default_class: interactive, on_store_outage: lease}
  strict: {default_class: interactive, on_store_outage: closed}
  bulk: {default_class: batch, on_store_outage: lease}
  spare: {default_class: batch, on_store_outage: closed}
"""


class Site(TenantSite):
    def ask(self, tenant: str, **more: Any) -> httpx.Response:
        return self.post(tenant, **{"max_tokens": 8} | more)


@pytest.fixture(scope="module")
def site(store: StoppableStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The store stops answering once every tenant was served."""
    flags = ("--quota-lease=20", f"--redis-url=unix://{store.path}")
    with tenant_site(Site, tmp_path_factory.mktemp("outage"), POLICY, *flags) as site:
        assert [site.ask(tenant).status_code for tenant in site.keys] == [200] * len(site.keys)
        eventually(lambda: all(_has_slice(store, tenant) for tenant in ("bridged", "bulk")))
        store.signal(signal.SIGSTOP)
        yield site
        store.signal(signal.SIGCONT)


def _has_slice(store: StoppableStore, tenant: str) -> bool:
    with store.client as client:
        return any(name.startswith(b"s:") for name in client.hkeys(f"sluice:{{{tenant}}}"))


def test_while_the_store_hangs_each_class_is_served_as_its_policy_says(site: Site) -> None:
    """The first waits as long as the store is given, and nobody longer. What `bulk` uses up is its own."""
    statuses = {tenant: site.ask(tenant).status_code for tenant in ("strict", "spare", "bulk", "bridged", "paying")}
    assert statuses == {"paying": 200, "bridged": 200, "strict": 503, "bulk": 200, "spare": 503}
    assert site.ask("bulk", max_tokens=1900, stop=["3"]).status_code == 503, "more than was set aside for it"
    assert site.ask("bridged").status_code == site.ask("paying").status_code == 200


def test_a_refusal_for_the_store_is_ours_and_says_when_to_come_back(site: Site) -> None:
    reply = site.ask("spare")
    assert reply.json()["error"]["code"] == "quota_unverifiable"
    assert reply.headers["x-sluice-dropped-reason"] == "quota_store"
    assert 1 <= int(reply.headers["retry-after"]) <= 5 and "x-should-retry" not in reply.headers


def test_the_rule_is_the_tenants_whatever_class_it_asks_for(site: Site) -> None:
    """No request of a lower class goes through where one of a higher class, of the same tenant, would not."""
    for tenant, served in (("paying", True), ("strict", False)):
        statuses = [site.ask(tenant, service_tier=tier).status_code for tier in ("priority", "flex")]
        assert statuses == [200 if served else 503] * 2
