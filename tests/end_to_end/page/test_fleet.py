"""The admin page and the doctor of a router, before two real replicas."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from tests.end_to_end.page.page_object import Page, PageMaker
from tests.fleet.fleet_site import FleetSite, fleet_site
from tests.gateway.server_process import BODY, PATIENCE, bearer, eventually, sluice

pytestmark = pytest.mark.nightly  # the night has the time for pages of every width and key

POLICY = """
tenants:
  acme: {weight: 3}
  bolt: {}
"""
SENT = {"acme": 6, "bolt": 4}  # requests at any time, of which two run on each replica
LONG = BODY | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
FOCUSED = "document.activeElement"
REPLICAS, TENANTS = "#replicas tbody button", "#tenants tbody button"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetSite]:
    flags = ("--max-num-seqs", "2", "--overload", "unbounded")  # or what is to be seen waiting is refused
    with fleet_site(tmp_path_factory.mktemp("fleet"), POLICY, *flags) as site:
        yield site


@pytest.fixture
def open_fleet(site: FleetSite, open_tab: PageMaker) -> PageMaker:
    """Makes tabs that have signed in to the router and show its replicas."""

    def make(**options: int | bool) -> Page:
        page = open_tab(site.admin_url, **options)
        page.sign_in(site.replicas[0].admin_key)
        page.until_count("#replicas tbody tr", 2)
        return page

    return make


@pytest.fixture
def busy(site: FleetSite) -> Iterator[None]:
    """Long answers of two tenants come through the router all the time, while others wait."""

    async def ask(tenant: str) -> None:
        url, headers = f"{site.url}/v1/chat/completions", bearer(site.keys[tenant])
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            while True:
                async with client.stream("POST", url, json=LONG, headers=headers) as response:
                    async for _ in response.aiter_raw():
                        pass

    with start_blocking_portal() as portal:
        asking = [portal.start_task_soon(ask, tenant) for tenant, count in SENT.items() for _ in range(count)]
        yield
        for one in asking:
            one.cancel()


@contextmanager
def stopped(site: FleetSite, number: int) -> Iterator[str]:
    """A replica does nothing while the block runs; the block begins when the router knows."""
    process, name = site.replicas[number].process, site.replicas[number].url.removeprefix("http://")
    process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: site.report()[name]["condition"] == "silent")
        yield name
    finally:
        process.send_signal(signal.SIGCONT)
        eventually(lambda: site.available() == len(site.replicas))


def found(site: FleetSite) -> dict[str, Any]:
    """What the router finds, by name."""
    url = f"{site.admin_url}/admin/v1/diagnosis"
    reply = httpx.get(url, headers=site.admin_headers, timeout=PATIENCE).json()
    return {one["name"]: one for one in reply["findings"]}


def names(site: FleetSite) -> list[str]:
    return sorted(one.url.removeprefix("http://") for one in site.replicas)


def test_replicas_are_shown_side_by_side_and_tenants_summed(site: FleetSite, busy: None, open_fleet: PageMaker) -> None:
    page = open_fleet()
    assert page.column("#replicas") == names(site)
    page.until("document.querySelectorAll('#replicas .state.serving').length === 2")
    running = "[...document.querySelectorAll('#replicas tbody tr')].map(row => row.children[2].innerText).join()"
    page.until(f"{running} === '2,2'")
    page.until_reads("#gauges", "2 / 2")
    page.until_reads("#gauges", "4 / 4")
    for tenant, count in SENT.items():
        row = f"[...document.querySelectorAll('#tenants tbody tr')].find(row => row.innerText.startsWith('{tenant}'))"
        page.until(f"Number({row}.children[1].innerText) + Number({row}.children[3].innerText) === {count}")
        page.until(f"{row}.children[4].innerText === '{count}'")  # open at the router
    page.until(f"{row}.children[6].innerText.includes('waiting') || {row}.children[6].innerText.includes('running')")
    assert page.js("document.title").endswith("running, 6 waiting · embedded · Sluice")


def test_a_replica_and_a_tenant_are_opened_and_closed_from_the_keyboard(
    site: FleetSite, busy: None, open_fleet: PageMaker
) -> None:
    page = open_fleet()
    page.until_count(TENANTS, 2)
    page.tab_to(".skip")
    page.press("Enter", "Tab")
    page.tab_to(REPLICAS)
    first = page.focused()
    page.press("Enter")
    page.until_reads("#replica-dialog", "Its own admin page")
    assert page.text("#replica-title") == f"Replica {first}" == f"Replica {names(site)[0]}"
    page.until("document.querySelector('#replica-dialog tbody button')")
    page.tab_to("#replica-dialog tbody button")
    tenant = page.focused()
    page.press("Enter")
    page.until_shown("#tenant-dialog .facts")
    page.until_gone("#replica-dialog")
    assert page.text("#tenant-title") == f"Tenant {tenant}"
    page.until_reads("#tenant-dialog", first)
    page.press("Escape")
    page.until_gone("#tenant-dialog")
    page.tab_to(TENANTS)
    assert page.js(f"getComputedStyle({FOCUSED}).outline").endswith("solid 2px")


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_on_a_telephone_and_in_the_dark(busy: None, open_fleet: PageMaker, dark: bool) -> None:
    page = open_fleet(width=360, dark=dark)
    page.until_count(TENANTS, 2)
    background = page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(background) < 60) is dark
    page.until_it_fits(360, 480, 768, 1280)
    page.resize(360)
    for selector in (REPLICAS, TENANTS):
        page.click(selector)
        page.until_shown("dialog[open] .facts")
        page.until_it_fits(360)
        page.press("Escape")
        page.until_gone("dialog[open]")


def test_every_control_and_region_has_a_name(open_fleet: PageMaker) -> None:
    nodes = open_fleet().send("Accessibility.getFullAXTree")["nodes"]
    told = [(node["role"]["value"], node["name"]["value"]) for node in nodes if not node["ignored"]]
    named = {"button", "textbox", "searchbox", "region", "image", "table", "dialog", "link"}
    assert [role for role, name in told if role in named and not name] == []
    assert [role for role, _ in told].count("main") == 1


def test_a_replica_that_does_nothing_is_seen_and_named_by_the_doctor(site: FleetSite, open_fleet: PageMaker) -> None:
    page = open_fleet()
    with stopped(site, 1) as name:
        page.until_count("#replicas .state.silent", 1)
        page.until_reads("#gauges", "1 / 2")
        eventually(lambda: "replica_silent" in found(site))  # what was found a moment before may be told again
        assert found(site)["replica_silent"]["replicas"] == [name]
        key_file = site.folder / "state" / "admin-key"
        told = sluice("doctor", "--live", site.admin_url, "--key-file", key_file).stdout.splitlines()
        line = told.index(f"warning  {name}: no recent state, so no requests are sent there")
        assert told[line + 1].startswith("         told it ")
    page.until_count("#replicas .state.serving", 2)
