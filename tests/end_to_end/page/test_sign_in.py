"""An admin signs in at a provider in a browser: the tests' own, or npm's `oidc-provider` by `scripts/check_oidc.py`."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import httpx
import pytest
import uvicorn

from backend.bound_process import bound
from tests.end_to_end.page.browser import Chromium
from tests.end_to_end.page.page_object import Page
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
def npm_provider(directory: str, redirect: str) -> Iterator[str]:
    port, program = free_port(), Path(__file__).with_name("oidc_provider.mjs")
    node = shutil.which("node")
    assert node is not None
    process = subprocess.Popen(**bound([node, str(program), str(port), redirect, CLIENT]), cwd=directory)
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, bool]]:
    """A gateway whose admins sign in at a provider, and whether that asks for their names."""
    port, directory = free_port(), os.environ.get(NPM)
    page = f"http://127.0.0.1:{port}/"
    provider = npm_provider(directory, f"{page}oidc/callback") if directory else own_provider()
    with provider as issuer:
        policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
        policy.write_text("tenants: {acme: {}}")
        flags = ("--admin-port", str(port), "--admin-url", page, "--oidc-issuer", issuer, "--oidc-client-id", CLIENT)
        roles = ("--oidc-role", "operator=ops", "--oidc-role", "admin=platform", "--policy", str(policy))
        with running_server(tmp_path_factory.mktemp("site"), *flags, *roles) as server:
            yield server, directory is not None


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
