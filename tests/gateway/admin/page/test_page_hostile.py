"""Tenants choose their names. A name is text, whatever it looks like, and takes the room of a name."""

import pytest

from tests.gateway.admin.page import page_data
from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.page_object import Page, PageMaker

HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\">",
    "<script>document.title='taken'</script>",
    "\"><svg onload=document.title='taken'>",
    "javascript:document.title='taken'",
    "{{constructor.constructor('document.title=1')()}}",
    "acme\u202efdp.exe\u2066",
    "acme\u200b",
    "zalgo" + "\u0335\u0322\u0489" * 3000,
    "👩‍👩‍👧‍👦🏴‍☠️" * 6,
    "漢字" * 5000,
    "x" * 10_000,
    "two\nlines\tand\u2028a third\x00",
    "__proto__",
    "constructor",
    "",
    " ",
    "acme ",
    "acme\u00a0inc",
    "../../drain?",
    "%2e%2e%2f",
    "\ud800lone",
)


@pytest.fixture
def hostile(gateway: FakeGateway) -> FakeGateway:
    """Fills every name and every text that may come from outside with a hostile one."""
    names = tuple(name.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for name in HOSTILE)
    requests, refused = page_data.requests(len(names), names), page_data.refusals(len(names), names)
    for number, name in enumerate(names):
        requests["live"][number] |= dict.fromkeys(("tenant", "model", "reason", "class", "key"), name)
        requests["recent"][number] |= {"tenant": name, "code": name}
        refused["refusals"][number] |= {"tenant": name, "message": name, "reason": name}
    policy = {"version": "1", "problem": HOSTILE[10]}
    gateway.answers |= {
        "tenants": page_data.tenants(names),
        "requests": requests,
        "kv": page_data.kv(names),
        "refusals": refused,
        "overview": gateway.answers["overview"] | {"model": HOSTILE[0], "policy": policy},
        "diagnosis": {"findings": [dict.fromkeys(("trouble", "evidence", "remedy", "severity"), HOSTILE[1])]},
    }
    return gateway


@pytest.fixture
def everyone(hostile: FakeGateway, open_board: PageMaker) -> Page:
    """Opens the board and unfolds its table of tenants."""
    page = open_board()
    page.click("#tenants .foot button")
    page.until_count("#tenants tbody tr", len(HOSTILE))
    return page


@pytest.mark.parametrize("width", [360, 1280])
def test_hostile_names_are_text_and_break_nothing(hostile: FakeGateway, open_board: PageMaker, width: int) -> None:
    page = open_board(width=width)
    for table in ("#tenants", "#live", "#refusals"):
        page.click(f"{table} .foot button")
    page.until_count("#tenants tbody tr", len(HOSTILE))
    assert "taken" not in page.js("document.title").replace(HOSTILE[0], "")
    assert page.count("img, main script, main iframe, main [onload], main [onerror]") == 0
    assert page.js("document.documentElement.scrollWidth") <= width
    assert max(page.js("[...document.querySelectorAll('tbody tr')].map(row => row.clientHeight)")) < 90
    assert page.complaints() == []


def spelled(code: str) -> str:
    return f"\u2039U+{code}\u203a"


def test_what_cannot_be_seen_is_spelled_out(everyone: Page) -> None:
    names = everyone.column("#tenants")
    assert HOSTILE[0] in names
    assert f"acme{spelled('202E')}fdp.exe{spelled('2066')}" in names
    assert f"acme{spelled('200B')}" in names
    assert f"two{spelled('000A')}lines{spelled('0009')}and{spelled('2028')}a third{spelled('0000')}" in names
    assert "👩‍👩‍👧‍👦🏴‍☠️" * 6 in names
    assert "x" * 80 + "… (10,000 characters)" in names
    assert {"__proto__", "constructor", "(none)", spelled("0020"), f"acme{spelled('0020')}"} <= set(names)
    assert f"acme{spelled('00A0')}inc" in names


def test_every_hostile_tenant_and_request_opens_and_nothing_else_is_asked(hostile: FakeGateway, everyone: Page) -> None:
    page = everyone
    for row in range(1, len(HOSTILE) + 1):
        if page.column("#tenants")[row - 1] == "(none)":
            continue  # no address can name it
        page.click(f"#tenants tbody tr:nth-child({row}) button")
        page.until_shown("#tenant-dialog :is(table, .problem)")  # some are longer than an address
        page.press("Escape")
        page.until_gone("#tenant-dialog")
    page.click("#live tbody tr button.id")
    page.until_shown("#request-dialog .lanes")
    assert page.count("dialog img, dialog script") == 0
    paths = {url.removeprefix(hostile.url).split("/")[3] for url in page.requested() if "/admin/" in url}
    assert paths == {"overview", "tenants", "requests", "queue", "kv", "refusals", "diagnosis"}
