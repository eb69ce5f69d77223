"""The page asks for the admin key, and keeps it in its tab alone."""

from tests.gateway.admin.page.fake_gateway import KEY, FakeGateway
from tests.gateway.admin.page.page_object import Page, PageMaker

REJECTED = "network: Failed to load resource: the server responded with a status of 401 (Unauthorized)"
STORED = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"


def test_nothing_is_asked_of_the_api_before_a_key_is_given(open_page: PageMaker, gateway: FakeGateway) -> None:
    page = open_page()
    assert "Admin key" in page.text("body")
    assert page.js("document.activeElement.id") == "admin-key"
    assert not any("/admin/" in url for url in page.requested())


def test_a_wrong_key_is_refused_in_words_and_not_kept(open_page: PageMaker) -> None:
    page = open_page()
    page.sign_in("sk-of-a-tenant")
    page.until_reads("#sign-in-problem", "This key is not accepted.")
    assert page.js(STORED) == '[{},{},""]'
    assert page.complaints() == [REJECTED]


def test_a_key_that_no_header_can_hold_is_a_wrong_one(open_page: PageMaker) -> None:
    page = open_page()
    page.sign_in(KEY + "\N{ZERO WIDTH SPACE}")
    page.until_reads("#sign-in-problem", "This key is not accepted.")


def test_a_wrong_key_can_be_typed_over(open_page: PageMaker) -> None:
    page = open_page()
    page.sign_in("wrong")
    page.until("document.querySelector('#sign-in-problem').innerText")
    page.type(KEY)  # what was wrong is selected
    page.press("Enter")
    page.until("document.querySelector('.line')")


def test_the_key_is_kept_in_this_tab_only_and_survives_a_reload(board: Page, open_page: PageMaker) -> None:
    assert board.js(STORED) == f'[{{"sluice-admin-key":"{KEY}"}},{{}},""]'
    assert board.js("document.querySelector('#admin-key').value") == ""
    board.reload()
    board.until("document.querySelector('.line') && document.querySelector('#sign-in').hidden")
    assert open_page().js(STORED) == '[{},{},""]'


def test_signing_out_forgets_the_key_and_stops_asking(board: Page, gateway: FakeGateway) -> None:
    board.click("#sign-out")
    board.until("!document.querySelector('#sign-in').hidden && document.querySelector('#board').hidden")
    assert board.js(STORED) == '[{},{},""]'


def test_a_key_that_is_changed_while_the_page_is_open_is_asked_for_again(board: Page, gateway: FakeGateway) -> None:
    gateway.stop()
    gateway.use_key("another")
    gateway.start()
    board.until("!document.querySelector('#try-now').hidden || !document.querySelector('#sign-in').hidden")
    board.until_reads("#sign-in-problem", "The key is no longer accepted.")
    assert board.js(STORED) == '[{},{},""]'
    board.sign_in("another")
    board.until_shown("#board")


def test_a_gateway_that_is_gone_is_not_a_wrong_key(open_page: PageMaker, gateway: FakeGateway) -> None:
    page = open_page()
    gateway.stop()
    page.sign_in(KEY)
    page.until_reads("#sign-in-problem", "The gateway cannot be asked: no answer.")
    gateway.start()
