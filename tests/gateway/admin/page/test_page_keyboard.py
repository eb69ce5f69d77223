"""Everything the page can do, without a mouse."""

from tests.gateway.admin.page.browser import Page
from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.page_data import TENANTS
from tests.gateway.admin.page.steps import first_column, tab_to

FOCUSED = "document.activeElement"


def test_a_table_is_sorted_from_the_keyboard_and_says_how(board: Page) -> None:
    tab_to(board, "#tenants thead button")
    assert board.js(f"{FOCUSED}.innerText") == "Tenant"
    board.press("Enter")
    board.until("document.querySelector('#tenants th').ariaSort === 'ascending'")
    assert first_column(board, "#tenants") == sorted(TENANTS)
    board.press("Space")
    board.until("document.querySelector('#tenants th').ariaSort === 'descending'")
    assert first_column(board, "#tenants") == sorted(TENANTS, reverse=True)
    assert len(board.texts("#tenants [aria-sort]")) == 1


def test_a_request_is_opened_closed_and_cancelled_from_the_keyboard(board: Page, gateway: FakeGateway) -> None:
    tab_to(board, "#live button.id")
    request = board.js(f"{FOCUSED}.innerText")
    board.press("Enter")
    board.until("document.querySelector('#request-dialog .lanes')")
    assert board.js(f"document.querySelector('#request-dialog').contains({FOCUSED})")
    board.press("Escape")
    board.until("!document.querySelector('#request-dialog').open")
    assert board.js(f"{FOCUSED}.innerText") == request
    board.press("Tab")
    assert board.js(f"{FOCUSED}.innerText") == "Cancel"
    board.press("Enter", "Tab", "Enter")
    board.until("!document.querySelector('#cancel-dialog').open")
    assert len(gateway.cancelled) == 1


def test_the_focus_stays_where_it_is_while_rows_come_and_go(board: Page, gateway: FakeGateway) -> None:
    tab_to(board, "#live button.id")
    request = board.js(f"{FOCUSED}.innerText")
    rows = gateway.answers["requests"]["live"]
    turned = [row | {"age": 20 - row["age"]} for row in rows]
    gateway.answers["requests"] = {"live": turned, "recent": [], "truncated": 0}
    board.until(f"document.querySelector('#live tbody .id').innerText !== '{request}'")
    assert board.js(f"{FOCUSED}.innerText") == request
    gateway.answers["requests"] = {"live": rows[:1], "recent": [], "truncated": 0}
    board.until("document.querySelectorAll('#live tbody tr').length <= 2")
    assert board.js(f"{FOCUSED}.innerText") == request


def test_a_chart_is_read_second_by_second_with_the_arrow_keys(board: Page) -> None:
    tab_to(board, ".chart > svg")
    board.press("PageUp", "ArrowLeft")
    assert board.text("#announcer").startswith("31 s ago: output ")
    board.press("ArrowRight")
    assert board.text("#announcer").startswith("30 s ago: output ")
    board.press("Escape")
    assert board.count(".pointer.away") == 6


def test_the_first_stop_leads_past_the_charts(board: Page) -> None:
    board.js("document.activeElement.blur()")
    tab_to(board, ".skip")
    assert board.js(f"{FOCUSED}.getBoundingClientRect().top") >= 0
    board.press("Enter")
    board.press("Tab")
    assert board.js(f"document.querySelector('#tenants').contains({FOCUSED})")


def test_the_focus_can_be_seen_wherever_it_is(board: Page) -> None:
    for selector in (
        "#pause",
        ".chart > svg",
        "#filter",
        "#tenants thead button",
        "[name=which]",
        "#live tbody button",
    ):
        tab_to(board, selector)
        assert board.js(f"getComputedStyle({FOCUSED}).outline").endswith("solid 2px"), selector


def accessible(page: Page) -> list[tuple[str, str]]:
    """Role and name of everything that a screen reader is told of."""
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
