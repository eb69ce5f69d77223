"""The view of usage and spend."""

import httpx

from tests.gateway.admin.page import page_data
from tests.gateway.admin.page.browser import Chromium
from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.steps import PageMaker, column, first_column, sign_in, until_nothing_is_cut_off
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually

HOSTILE = "<img src=x onerror=document.title=1>"
NAMES = (HOSTILE, "x" * 200, *(f"tenant-{number:03d}" for number in range(300)))


def test_totals_days_tenants_and_budgets_are_told(gateway: FakeGateway, open_board: PageMaker) -> None:
    page = open_board()
    page.click("#views [href='#/usage']")
    page.until_count("#usage-table tbody tr", 10)
    assert "Cost\n51.72 EUR" in page.text("#usage-totals")
    assert first_column(page, "#usage-table")[0] == "acme"
    assert column(page, "#usage-table", 7)[:4] == ["51.72 EUR", "13.94 EUR", "11.00 EUR", ""]  # the last has no price
    assert page.count(".days rect") == 42
    assert page.attributes(".days", "aria-label")[0].startswith("Tokens by day. 2026-09-01: ")
    assert column(page, "#usage-budgets", 4)[0] == "300,000 (3 %)"
    assert column(page, "#usage-budgets", 4)[5] == "unknown"
    assert page.count("#usage-budgets .low") == 1
    page.click("[name=usage-by][value=key]")
    page.until("performance.getEntriesByType('resource').some(({name}) => name.includes('by=key'))")


def test_the_period_is_chosen_and_what_is_shown_is_downloaded(gateway: FakeGateway, open_board: PageMaker) -> None:
    page = open_board()
    page.click("#views [href='#/usage']")
    page.until_count("#usage-table tbody tr", 10)
    page.js(
        "(f => { f.value = '2026-09-01'; f.dispatchEvent(new Event('change', {bubbles: true})) })"
        "(document.querySelector('#usage-from'))"
    )
    page.until("performance.getEntriesByType('resource').some(({name}) => name.includes('from=2026-09-01'))")
    assert page.js("document.querySelector('#usage-preset').value") == "As chosen"
    name, text = page.download("#usage-csv")
    assert text == "day,tenant\n2026-09-01,acme\n"
    page.until("performance.getEntriesByType('resource').some(({name}) => name.includes('usage.csv?from=2026-09-01'))")
    assert name.startswith("usage-2026-09-01-")


def test_many_long_and_hostile_names_fit_every_screen(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers |= {"usage": page_data.usage(NAMES), "budgets": page_data.budgets(NAMES)}
    page = open_board(width=400)
    page.click("#views [href='#/usage']")
    page.until_count("#usage-table tbody tr", 25)
    for width in (400, 800, 1440):
        page.resize(width)
        until_nothing_is_cut_off(page)
    assert page.count("main img") == 0
    gateway.answers |= {"usage": page_data.usage(()), "budgets": {"budgets": [], "truncated": 0}}
    page.js("document.querySelector('[name=usage-by][value=key]').click()")
    page.until_reads("#usage-table", "Nothing was used in these days.")


def test_what_a_gateway_serves_is_in_its_usage_a_little_later(server: ServerProcess, chromium: Chromium) -> None:
    body = {"model": "embedded", "prompt": "Count.", "max_tokens": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=PATIENCE).raise_for_status()
    eventually(lambda: "demo" in [row["tenant"] for row in server.admin("usage")["rows"]])
    with chromium.opened_page() as page:
        page.go(f"{server.admin_url}/#/usage")
        page.until("!document.querySelector('#sign-in').hidden")
        sign_in(page, server.admin_key)
        page.until_reads("#usage-table", "demo")
        assert page.complaints() == []
    reply = httpx.get(f"{server.admin_url}/admin/v1/usage.csv", headers=server.admin_headers)
    assert reply.headers["content-type"].startswith("text/csv")
    assert reply.text.startswith("day,tenant,requests,")
    assert httpx.get(f"{server.admin_url}/admin/v1/usage.csv").status_code == 401
