"""The quota store hangs, dies and forgets under a gateway that serves; a replica dies."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.server_process import BODY, ServerProcess, eventually, in_threads, running_server
from tests.gateway.stoppable_store import StoppableStore
from tests.gateway.tenant_site import TenantSite, tenant_site

AMOUNT = 1_000_000
POLICY = f"tenants: {{demo: {{limits: {{tokens: {AMOUNT}/month, concurrent_requests: 40}}}}}}"
LEASE = "6"


@pytest.fixture(scope="module")
def flags(store: StoppableStore, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY)
    return ["--threads=1", f"--policy={policy}", f"--redis-url=unix://{store.path}", f"--quota-lease={LEASE}"]


@pytest.fixture(scope="module")
def server(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("one"), *flags) as server:
        yield server


def ask(server: ServerProcess, **more: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", **BODY | {"max_tokens": 20} | more)


def tokens(*replies: httpx.Response) -> int:
    assert [reply.status_code for reply in replies] == [200] * len(replies)
    return sum(reply.json()["usage"]["total_tokens"] for reply in replies)


def used(server: ServerProcess) -> int:
    return AMOUNT - server.remaining("tokens")


def held(server: ServerProcess) -> int:
    return 40 - server.remaining("concurrent_requests")


def is_connected(server: ServerProcess) -> bool:
    return bool(httpx.get(f"{server.url}/readyz").json()["quota_store"] == "connected")


def test_requests_go_on_while_the_store_hangs_and_are_charged_afterwards(
    store: StoppableStore, server: ServerProcess
) -> None:
    spent = tokens(ask(server))
    eventually(lambda: store.has_slice("demo"))
    before = used(server)
    replies: list[httpx.Response] = []
    try:
        with in_threads(lambda: replies.append(ask(server, ignore_eos=True, max_tokens=400))):
            eventually(lambda: held(server) == 1)
            store.signal(signal.SIGSTOP)
            replies += [ask(server) for _ in range(5)]
            assert not is_connected(server)
    finally:
        store.signal(signal.SIGCONT)
    spent = tokens(*replies)
    eventually(lambda: is_connected(server) and held(server) == 0)
    eventually(lambda: used(server) - before == spent)


@pytest.mark.parametrize("fault", ["killed", "flushed"])
def test_a_store_that_forgot_everything_is_told_what_was_used(
    store: StoppableStore, server: ServerProcess, fault: str
) -> None:
    tokens(ask(server))
    eventually(lambda: store.has_slice("demo"))
    before = used(server)
    if fault == "killed":
        store.kill()
        replies = [ask(server) for _ in range(3)]
        store.start()
    else:
        with store.client as client:
            client.flushall()
        replies = [ask(server) for _ in range(3)]
    spent = tokens(*replies)
    eventually(lambda: is_connected(server) and held(server) == 0)
    eventually(lambda: used(server) >= before + spent)
    assert used(server) <= before + spent + 100, "at most what was reserved when it was last seen"
    assert tokens(ask(server))


def test_a_killed_replica_leaves_nothing_held_past_its_lease(
    server: ServerProcess, flags: list[str], tmp_path: Path
) -> None:
    with running_server(tmp_path, *flags) as other:
        tokens(ask(other))
        with in_threads(*[partial(_broken, other)] * 3):
            eventually(lambda: held(server) >= 3)
            os.kill(other.process.pid, signal.SIGKILL)
    eventually(lambda: tokens(ask(server)) > 0 and held(server) == 0)


def _broken(server: ServerProcess) -> None:
    with pytest.raises(httpx.HTTPError):
        ask(server, ignore_eos=True, max_tokens=1500)


CLASSES = """
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
    with tenant_site(Site, tmp_path_factory.mktemp("outage"), CLASSES, *flags) as site:
        assert [site.ask(tenant).status_code for tenant in site.keys] == [200] * len(site.keys)
        eventually(lambda: all(store.has_slice(tenant) for tenant in ("bridged", "bulk")))
        store.signal(signal.SIGSTOP)
        yield site
        store.signal(signal.SIGCONT)


def test_while_the_store_hangs_each_class_is_served_as_its_policy_says(site: Site) -> None:
    """The first waits for the store's timeout, and later ones not at all. What `bulk` uses up is its own."""
    statuses = {tenant: site.ask(tenant).status_code for tenant in ("strict", "spare", "bulk", "bridged", "paying")}
    assert statuses == {"paying": 200, "bridged": 200, "strict": 503, "bulk": 200, "spare": 503}
    assert site.ask("bulk", max_tokens=1900, stop=["3"]).status_code == 503, "more than was set aside for it"
    assert site.ask("bridged").status_code == site.ask("paying").status_code == 200


def test_a_refusal_for_the_store_is_ours_and_says_when_to_come_back(site: Site) -> None:
    reply = site.ask("spare")
    assert reply.json()["error"]["code"] == "quota_unverifiable"
    assert reply.headers["x-sluice-dropped-reason"] == "quota_store"
    assert 1 <= int(reply.headers["retry-after"]) <= 5 and "x-should-retry" not in reply.headers


def test_the_rule_is_the_tenants_in_every_class(site: Site) -> None:
    """No request of a lower class goes through where one of a higher class, of the same tenant, would not."""
    for tenant, served in (("paying", True), ("strict", False)):
        statuses = [site.ask(tenant, service_tier=tier).status_code for tier in ("priority", "flex")]
        assert statuses == [200 if served else 503] * 2
