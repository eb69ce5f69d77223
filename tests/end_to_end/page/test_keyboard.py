"""Everything on the page can be done without a mouse."""

import pytest

from tests.end_to_end.page.fake_gateway import FakeGateway
from tests.end_to_end.page.page_data import TENANTS
from tests.end_to_end.page.page_object import Page

pytestmark = pytest.mark.nightly  # the night has the time for pages of every width and key

FOCUSED = "document.activeElement"
STOPS = ("#pause", ".chart > svg", "#filter", "#tenants thead button", "[name=which]", "#live tbody button")
ORDER = "document.querySelector('#tenants th').ariaSort"


def test_a_table_is_sorted_from_the_keyboard_and_says_how(board: Page) -> None:
    board.tab_to("#tenants thead button")
    assert board.focused() == "Tenant"
    board.press("Enter")
    board.until(f"{ORDER} === 'ascending'")
    assert board.column("#tenants") == sorted(TENANTS)
    board.press("Space")
    board.until(f"{ORDER} === 'descending'")
    assert board.column("#tenants") == sorted(TENANTS, reverse=True)
    assert len(board.texts("#tenants [aria-sort]")) == 1


def test_a_request_is_opened_closed_and_cancelled_from_the_keyboard(board: Page, gateway: FakeGateway) -> None:
    board.tab_to("#live button.id")
    request = board.focused()
    board.press("Enter")
    board.until_shown("#request-dialog .lanes")
    assert board.js(f"document.querySelector('#request-dialog').contains({FOCUSED})")
    board.press("Escape")
    board.until_gone("#request-dialog")
    assert board.focused() == request
    board.press("Tab")
    assert board.focused() == "Cancel"
    board.press("Enter", "Tab", "Enter")
    board.until_gone("#cancel-dialog")
    assert len(gateway.cancelled) == 1


def test_the_focus_stays_where_it_is_while_rows_come_and_go(board: Page, gateway: FakeGateway) -> None:
    board.tab_to("#live button.id")
    request = board.focused()
    rows = gateway.answers["requests"]["live"]
    gateway.show_requests(*(row | {"age": 20 - row["age"]} for row in rows))
    board.until(f"document.querySelector('#live tbody .id').innerText !== '{request}'")
    assert board.focused() == request
    gateway.show_requests(rows[0])
    board.until("document.querySelectorAll('#live tbody tr').length <= 2")
    assert board.focused() == request


def test_a_chart_is_read_second_by_second_with_the_arrow_keys(board: Page) -> None:
    board.tab_to(".chart > svg")
    board.press("PageUp", "ArrowLeft")
    assert board.text("#announcer").startswith("31 s ago: output ")
    board.press("ArrowRight")
    assert board.text("#announcer").startswith("30 s ago: output ")
    board.press("Escape")
    assert board.count(".pointer.away") == 6


def test_the_first_stop_leads_past_the_charts(board: Page) -> None:
    board.js("document.activeElement.blur()")
    board.tab_to(".skip")
    assert board.js(f"{FOCUSED}.getBoundingClientRect().top") >= 0
    board.press("Enter", "Tab")
    assert board.js(f"document.querySelector('#tenants').contains({FOCUSED})")


def test_the_focus_can_be_seen_wherever_it_is(board: Page) -> None:
    for selector in STOPS:
        board.tab_to(selector)
        assert board.js(f"getComputedStyle({FOCUSED}).outline").endswith("solid 2px"), selector


def accessible(page: Page) -> list[tuple[str, str]]:
    """Returns role and name of everything that a screen reader is told of."""
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    return [(node["role"]["value"], node["name"]["value"]) for node in nodes if not node["ignored"]]


def test_every_control_region_and_picture_has_a_name(board: Page) -> None:
    named = {"button", "textbox", "searchbox", "radio", "region", "img", "image", "figure", "table", "dialog", "link"}
    nodes = [(role, name) for role, name in accessible(board) if role in named]
    assert len(nodes) > 60
    assert [role for role, name in nodes if not name] == []


def test_there_is_one_main_landmark_with_sections_under_headings(board: Page) -> None:
    roles = [role for role, _ in accessible(board)]
    assert roles.count("main") == roles.count("banner") == 1
    headings = board.texts("#board h1, #view-now h2")
    assert headings == ["Sluice qwen3-0.6b", "Now", "Tenants", "KV pool", "Last five minutes", "Requests", "Refusals"]
