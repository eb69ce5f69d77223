"""An admin signs in at a provider in a browser: the tests' own, or npm's `oidc-provider` by `scripts/check_oidc.py`."""

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import uvicorn

from backend.bound_process import bound
from gateway.admin.audit_log import FILE
from tests.end_to_end.page.browser import Chromium
from tests.end_to_end.page.page_object import Page
from tests.fleet.fleet_site import running_router
from tests.gateway.server_process import ServerProcess, eventually, running_server
from tests.ports import free_port

pytest.importorskip("joserfc", reason="no joserfc here: the extra oidc")
providers = import_module("tests.gateway.admin.oidc_provider")

NPM = "SLUICE_OIDC_PROVIDER"  # a directory in which npm has installed oidc-provider
CLIENT = providers.CLIENT


@contextmanager
def own_provider() -> Iterator[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    provider = providers.OidcProvider(url)
    server = uvicorn.Server(uvicorn.Config(provider.app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    eventually(lambda: server.started)
    try:
        yield url
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextmanager
def npm_provider(directory: str, redirects: str) -> Iterator[str]:
    port, program = free_port(), Path(__file__).with_name("oidc_provider.mjs")
    node = shutil.which("node")
    assert node is not None
    process = subprocess.Popen(**bound([node, str(program), str(port), redirects, CLIENT]), cwd=directory)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/.well-known/openid-configuration").is_success
        except httpx.TransportError:
            return False

    try:
        eventually(answers)
        yield url
    finally:
        process.terminate()
        process.wait()


class Provider(NamedTuple):
    ports: tuple[int, int]  # of the admin pages of a gateway and a router, to which it sends browsers back
    issuer: str
    asks: bool  # for the names of admins

    def flags(self, place: int) -> tuple[str, ...]:
        """Of the program whose admin port is at this place: it lets the provider's admins in."""
        page = f"http://127.0.0.1:{self.ports[place]}/"
        roles = ("--oidc-role", "operator=ops", "--oidc-role", "admin=platform")
        own = ("--admin-port", str(self.ports[place]), "--admin-url", page)
        return *own, "--oidc-issuer", self.issuer, "--oidc-client-id", CLIENT, *roles


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    ports, directory = (free_port(), free_port()), os.environ.get(NPM)
    redirects = ",".join(f"http://127.0.0.1:{port}/oidc/callback" for port in ports)
    with npm_provider(directory, redirects) if directory else own_provider() as issuer:
        yield Provider(ports, issuer, directory is not None)


@pytest.fixture(scope="module")
def site(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, bool]]:
    """A gateway whose admins sign in at a provider, and whether that asks for their names."""
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text("tenants: {acme: {}}")
    with running_server(tmp_path_factory.mktemp("site"), *provider.flags(0), "--policy", str(policy)) as server:
        yield server, provider.asks


@pytest.fixture
def tab(site: tuple[ServerProcess, bool], chromium: Chromium) -> Iterator[Page]:
    with chromium.opened_page() as page:
        page.go(site[0].admin_url)
        page.until_shown("#provider a")
        yield page


def _answer(page: Page, name: str) -> None:
    """Fill in npm's pages: who it is, and that the gateway may know it."""
    page.until_shown("input[name=login]")
    page.fill("input[name=login]", name)
    page.fill("input[name=password]", "any")
    page.click("button[type=submit]")
    page.until("document.querySelector('input[name=prompt]')?.value === 'consent'")
    page.click("button[type=submit]")


def test_an_operator_signs_in_acts_by_name_and_is_refused_an_admins_work(
    site: tuple[ServerProcess, bool], tab: Page
) -> None:
    server, asks = site
    tab.click("#provider a")
    if asks:
        _answer(tab, "ada")
    tab.until_shown("#board")
    tab.until("document.body.dataset.role === 'operator'")
    assert tab.attributes("#sign-out", "title") == ["oidc:ada@example.com, operator"]
    assert tab.js("location.href") == f"{server.admin_url}/"
    ask = "path => fetch(`admin/v1/${path}`, {method: 'POST', headers: {authorization: 'Bearer ' + "
    ask += "sessionStorage.getItem('sluice-admin-key')}}).then(answer => answer.status)"
    assert [tab.call(ask, path) for path in ("policy/reload", "keys")] == [200, 403]
    entries = {(entry["action"], entry["actor"].split(" from ")[0]) for entry in server.admin("audit")["entries"]}
    assert {("admins.sign_in", "oidc:ada@example.com"), ("policy.reload", "oidc:ada@example.com")} <= entries
    tab.reload()
    tab.until_shown("#board")
    tab.click("#sign-out")
    tab.until_shown("#sign-in")
    tab.reload()
    tab.until_shown("#sign-in")  # a key is handed over once


def test_an_operator_signs_in_on_a_routers_page(
    site: tuple[ServerProcess, bool], provider: Provider, chromium: Chromium, tmp_path: Path
) -> None:
    state, replicas = site[0].log.parent / "state", tmp_path / "replicas.yaml"
    replicas.write_text(f"replicas: [{{url: '{site[0].url}', admin: '{site[0].admin_url}'}}]")
    flags = ("--replicas", str(replicas), "--port", "0", "--state-dir", str(state), *provider.flags(1))
    with running_router(tmp_path, "route", *flags) as (_, url), chromium.opened_page() as page:
        page.go(url)
        page.until_shown("#provider a")
        page.click("#provider a")
        if provider.asks:
            _answer(page, "ada")
        page.until_shown("#board")
        page.until_count("#replicas tbody tr", 1)
        assert page.js("location.href") == f"{url}/"
        ask = "path => fetch(path, {headers: {authorization: 'Bearer ' + sessionStorage.getItem('sluice-admin-key')}})"
        assert page.call(f"{ask}.then(answer => answer.status)", "admin/v1/fleet") == 200
        said = [(one["action"], one["actor"].split(" from ")[0]) for one in map(json.loads, _lines(state / FILE))]
        assert ("admins.sign_in", "oidc:ada@example.com") in said
        page.click("#sign-out")
        page.until_shown("#sign-in")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_who_has_no_role_is_told_so(site: tuple[ServerProcess, bool], tab: Page) -> None:
    if not site[1]:
        tab.go(f"{site[0].admin_url}/?problem=no_role")
    else:
        tab.click("#provider a")
        _answer(tab, "bob")
    tab.until_reads("#sign-in-problem", "You have signed in, but have no role here")
    assert "problem" not in tab.js("location.search")


def test_a_link_cannot_put_words_on_the_page(site: tuple[ServerProcess, bool], tab: Page) -> None:
    tab.go(f"{site[0].admin_url}/?problem=constructor")
    tab.until_shown("#provider a")
    assert tab.text("#sign-in-problem") == ""
