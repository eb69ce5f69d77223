"""The page bears many tenants, names of every kind and small screens, in light and dark."""

import pytest

from tests.end_to_end.page import page_data
from tests.end_to_end.page.fake_gateway import FakeGateway
from tests.end_to_end.page.page_object import Page, PageMaker

pytestmark = pytest.mark.nightly  # the night has the time for pages of every width and key

MANY = tuple(f"tenant-{number:03d}" for number in range(500))


@pytest.fixture
def crowd(gateway: FakeGateway) -> FakeGateway:
    rows = page_data.requests(1000, MANY)
    gateway.answers |= {
        "tenants": page_data.tenants(MANY),
        "requests": rows,
        "queue": page_data.queue(rows["live"]),
        "kv": page_data.kv(MANY, 20_000),
    }
    return gateway


def test_of_many_tenants_and_requests_the_first_ones_are_drawn_and_the_rest_counted(
    crowd: FakeGateway, open_board: PageMaker
) -> None:
    page = open_board()
    assert len(page.column("#tenants")) == 12
    assert page.text("#tenants .foot span") == "and 488 more"
    assert page.text("#live .foot span") == "and 988 more"
    assert page.count("*") < 2500
    page.click("#tenants .foot button")
    page.until_count("#tenants tbody tr", 62)
    page.click("#filter")
    page.type("tenant-49")
    page.until_count("#tenants tbody tr", 10)


def test_rows_the_gateway_left_out_are_counted_as_well(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers["tenants"] |= {"truncated": 4321}
    assert open_board().text("#tenants .foot span") == "and 4,321 more"


def test_a_refresh_keeps_the_rows_it_has(crowd: FakeGateway, open_board: PageMaker) -> None:
    page = open_board()
    page.js("document.querySelectorAll('tbody tr').forEach(row => { row.known = true })")
    rows = crowd.answers["requests"]
    crowd.answers["requests"] = rows | {
        "live": [row | {"prompt_tokens": 1, "cached_tokens": 0} for row in rows["live"]]
    }
    page.until("document.querySelector('#live tbody tr').children[5].innerText === '1'")
    assert page.js("[...document.querySelectorAll('#live tbody tr')].every(row => row.known)")


def test_no_width_makes_the_page_scroll_sideways(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers["kv"] = page_data.kv_in_uses()
    page = open_board(width=320)
    page.until_reads("#problems", "queue time above target")  # longer than the window, and cut off in its box
    boxes = "[...document.querySelectorAll('.panel, header :not(summary *)')]"
    for width in (320, 360, 768, 1280, 1920):
        page.resize(width)
        rights = f"{boxes}.map(node => node.getBoundingClientRect().right)"
        page.until(f"Math.max(...{rights}) <= {width}")  # charts follow a frame after the window
        assert page.js("document.documentElement.scrollWidth") <= width


def test_tenants_are_seen_without_scrolling(crowd: FakeGateway, open_board: PageMaker) -> None:
    finding = crowd.answers["diagnosis"]["findings"][0]
    crowd.answers["diagnosis"] = {"findings": [finding] * 9}
    page = open_board(width=1440)
    page.until_reads("#problems", "9 warnings")
    bottoms = "[...document.querySelectorAll('#tenants tbody tr')].map(row => row.getBoundingClientRect().bottom)"
    assert len(page.js(bottoms)) == 12
    assert max(page.js(bottoms)) < 600
    assert page.js("document.querySelector('.chart').getBoundingClientRect().bottom") < 900


@pytest.mark.parametrize("width", [400, 800, 1440])
def test_no_table_is_cut_off(crowd: FakeGateway, open_board: PageMaker, width: int) -> None:
    page = open_board(width=width)
    page.until_count("#refusals tbody tr", 8)
    for which in ("live", "recent"):
        page.click(f"[name=which][value={which}]")
        wide = "[...document.querySelectorAll('.scroller')].filter(box => box.scrollWidth > box.clientWidth).length"
        assert page.js(wide) == 0
    names = [name for name in page.column("#tenants") if name]
    assert len(names) == 12
    widths = "[...document.querySelectorAll('#tenants tbody th')].map(cell => cell.clientWidth)"
    assert min(page.js(widths)) >= 90


def test_a_table_that_is_wider_than_the_screen_scrolls_by_itself_and_can_be_focused(open_board: PageMaker) -> None:
    page = open_board(width=320)
    page.js("document.querySelector('#live table').style.width = '900px'")
    page.until("(({scrollWidth, clientWidth}) => scrollWidth > clientWidth)(document.querySelector('#live .scroller'))")
    page.until("document.querySelector('#live .scroller').tabIndex === 0")


@pytest.mark.parametrize(("dark", "luminance"), [(False, "light"), (True, "dark")])
def test_the_scheme_of_the_reader_is_followed(open_board: PageMaker, dark: bool, luminance: str) -> None:
    page = open_board(dark=dark)
    background = page.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(background) < 60) is (luminance == "dark")


def test_nothing_moves_with_reduced_motion(board: Page) -> None:
    moving = "getComputedStyle(document.querySelector('.gauge .track span')).transitionDuration"
    assert board.js(moving) == "0.3s"
    board.want_no_motion()
    assert board.js(moving) == "0s"
    assert board.js("document.getAnimations().length") == 0


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


def test_invisible_characters_are_spelled_out(everyone: Page) -> None:
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


LONG = {
    "price": {"input": "0.125/1M", "output": "12.625/1M", "cached_input": "0.0125/1M", "currency": "EUR"},
    "models": ["meta-llama-3.1-70b-instruct", "qwen3-0.6b-instruct"],
    "prefix_cache": {"floor": "64MiB", "ceiling": "1GiB", "pinned": ["Be brief.", "Be kind."]},
}
WIDTHS = (800, 1280, 1440, 1920)
WHOLE = """[...document.querySelectorAll('%s tbody td')].filter(cell => cell.offsetParent)
  .flatMap(cell => [cell, ...cell.children])
  .every(box => box.scrollWidth <= box.clientWidth + 1 && box.scrollHeight <= box.clientHeight + 1)"""


def test_a_tenants_policy_is_shown_uncut(gateway: FakeGateway, open_board: PageMaker) -> None:
    tenants = gateway.answers["policy"]["effective"]["tenants"]
    tenants |= {name: fields | LONG for name, fields in tenants.items()}
    page = open_board("policy")
    page.until_count("#policy-tenants tbody tr", 3)
    for width in WIDTHS:
        page.resize(width)
        page.until(WHOLE % "#policy-tenants")


def test_audit_entries_and_refusals_are_shown_uncut(gateway: FakeGateway, open_board: PageMaker) -> None:
    page = open_board("keys")
    for table, view in (("#audit-table", "keys"), ("#refusals", "now")):
        page.click(f"#views [href='#/{view}']")
        page.until_shown(f"{table} tbody tr")
        for width in WIDTHS:
            page.resize(width)
            page.until(WHOLE % table)


LABELS = "[...document.querySelectorAll('#view-%s svg text')].filter(text => text.getClientRects().length)"
INSIDE = f"""(labels => labels.length && labels
  .map(text => [text, text.ownerSVGElement].map(box => box.getBoundingClientRect()))
  .every(([label, chart]) => label.left >= chart.left && label.right <= chart.right && label.bottom <= chart.bottom)
)({LABELS})"""
NAMES = "[...document.querySelectorAll('#usage-days text')].filter(text => text.textContent.startsWith('2026-'))"
APART = f"""(boxes => boxes.length && boxes[0].left >= 0
  && boxes.every((box, index) => box.right <= (boxes[index + 1] ?? {{left: innerWidth - 20}}).left)
)({NAMES}.map(text => text.getBoundingClientRect()))"""


@pytest.mark.parametrize("num_days", [1, 22, 25, 365])
def test_the_names_of_days_lie_within_their_chart_and_apart(
    gateway: FakeGateway, open_board: PageMaker, num_days: int
) -> None:
    (day, *_) = gateway.answers["usage"]["days"]
    gateway.answers["usage"]["days"] = [day | {"day": f"2026-01-{n % 31 + 1:02}"} for n in range(num_days)]
    page = open_board("usage")
    page.until_count("#usage-days rect", 2 * num_days)
    for width in (400, *WIDTHS):
        page.resize(width)
        page.until(f"document.querySelector('#usage-days svg').viewBox.baseVal.width <= {width}")
        page.until(APART)


@pytest.mark.parametrize("view", ["now", "usage"])
def test_no_label_of_an_axis_is_cut(open_board: PageMaker, view: str) -> None:
    page = open_board(view)
    page.until_shown(f"#view-{view} svg text")
    for width in (320, *WIDTHS):
        page.resize(width)
        page.until(INSIDE % view)
