"""The view of API keys creates, rotates and revokes keys of a gateway that serves."""

import httpx
import pytest

from tests.gateway.admin.page import page_data
from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.page_object import Page, PageMaker
from tests.gateway.server_process import ServerProcess

HOSTILE = "<img src=x onerror=document.title=1>"


@pytest.fixture
def keys(open_view: PageMaker) -> Page:
    page = open_view("keys")
    page.until_shown("#keys-table tbody tr")
    return page


def status(server: ServerProcess, key: str) -> int:
    return httpx.get(f"{server.url}/v1/limits", headers={"authorization": f"Bearer {key}"}).status_code


def row(key_id: str) -> str:
    return f"[...document.querySelectorAll('#keys-table tbody tr')].find(tr => tr.innerText.includes('{key_id}'))"


def secret(page: Page) -> str:
    key = page.text("#key-secret")
    page.press("Escape")
    page.until_count("#key-secret", 0)  # emptied a moment after it is closed
    assert not page.js("document.querySelector('#key-dialog').open")
    assert key not in page.js("document.documentElement.outerHTML")  # it was shown this once
    assert page.js("JSON.stringify([{...localStorage}, document.cookie])") == '[{},""]'
    return key


def test_a_key_is_made_used_rotated_and_revoked_and_all_of_it_is_on_record(server: ServerProcess, keys: Page) -> None:
    keys.click("#key-create")
    keys.type("acme")  # the tenant has the focus
    keys.click("#key-name")
    keys.type("made in a browser")
    keys.press("Enter")
    first = secret(keys)
    key_id = first.split("-")[2]
    assert status(server, first) == 200  # at once
    keys.until(f"{row(key_id)}.innerText.includes('made in a browser')")

    keys.click(f"[aria-label='Rotate key {key_id}']")
    keys.js("document.querySelector('#key-overlap').value = '0s'")
    keys.click("#key-dialog .primary")
    second = secret(keys)
    assert (status(server, first), status(server, second)) == (401, 200)

    keys.click(f"[aria-label='Revoke key {key_id}']")
    assert keys.focused() == "Close"  # not the one that revokes
    keys.click("#key-dialog .danger")
    keys.until_gone("#key-dialog")
    assert status(server, second) == 401
    keys.until(f"!{row(key_id)}")
    keys.until_reads("#audit-table", f"{key_id} of acme")
    audit = server.admin("audit")["entries"]
    actions = [entry["action"] for entry in audit if entry["target"] == f"{key_id} of acme"]
    assert actions == ["keys.revoke", "keys.rotate", "keys.create"]
    assert not any(key in server.log.read_text() + str(audit) for key in (first, second))


def test_a_key_is_made_without_a_mouse_and_bad_input_is_told_in_words(server: ServerProcess, keys: Page) -> None:
    keys.tab_to("#key-create")
    keys.press("Enter")
    keys.type("not a tenant!")
    keys.press("Enter")
    keys.until_reads("#key-dialog .problem", "Not done: tenant:")
    assert keys.js("document.querySelector('#key-dialog').open")
    keys.press("Escape")
    keys.until_gone("#key-dialog")


def test_names_are_text_and_small_screens_cut_nothing_off(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers["keys"] = page_data.keys((HOSTILE, "x" * 200, *page_data.TENANTS))
    for entry in gateway.answers["audit"]["entries"]:
        entry |= {"target": HOSTILE, "actor": HOSTILE, "result": HOSTILE}
    page = open_board("keys", width=400)
    page.until_count("#keys-table tbody tr", 12)
    page.until_it_fits(400, 800, 1440)
    assert page.count("main img, main script") == 0
    assert HOSTILE in page.text("#keys-table")
    assert page.count("#keys-table .buttons:not([hidden])") == 9  # those of policy files are changed there
