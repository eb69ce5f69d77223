"""The view of usage and spend shows totals, days, tenants and budgets."""

import httpx

from tests.gateway.admin.page import page_data
from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.page_object import PageMaker
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually

HOSTILE = "<img src=x onerror=document.title=1>"
NAMES = (HOSTILE, "x" * 200, *(f"tenant-{number:03d}" for number in range(300)))


def test_totals_days_tenants_and_budgets_are_told(gateway: FakeGateway, open_board: PageMaker) -> None:
    page = open_board("usage")
    page.until_count("#usage-table tbody tr", 10)
    assert "Cost\n51.72 EUR" in page.text("#usage-totals")
    assert page.column("#usage-table")[0] == "acme"
    assert page.column("#usage-table", 7)[:4] == ["51.72 EUR", "13.94 EUR", "11.00 EUR", ""]  # the last has no price
    assert page.count(".days rect") == 42
    assert page.attributes(".days", "aria-label")[0].startswith("Tokens by day. 2026-09-01: ")
    assert page.column("#usage-budgets", 4)[0] == "300,000 (3 %)"
    assert page.column("#usage-budgets", 4)[5] == "unknown"
    assert page.count("#usage-budgets .low") == 1
    page.click("[name=usage-by][value=key]")
    page.until_asked("by=key")


def test_the_period_is_chosen_and_what_is_shown_is_downloaded(gateway: FakeGateway, open_board: PageMaker) -> None:
    page = open_board("usage")
    page.until_count("#usage-table tbody tr", 10)
    page.fill("#usage-from", "2026-09-01")
    page.until_asked("from=2026-09-01")
    assert page.js("document.querySelector('#usage-preset').value") == "As chosen"
    name, text = page.download("#usage-csv")
    assert text == "day,tenant\n2026-09-01,acme\n"
    page.until_asked("usage.csv?from=2026-09-01")
    assert name.startswith("usage-2026-09-01-")


def test_many_long_and_hostile_names_fit_every_screen(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers |= {"usage": page_data.usage(NAMES), "budgets": page_data.budgets(NAMES)}
    page = open_board("usage", width=400)
    page.until_count("#usage-table tbody tr", 25)
    page.until_it_fits(400, 800, 1440)
    assert page.count("main img") == 0
    gateway.answers |= {"usage": page_data.usage(()), "budgets": {"budgets": [], "truncated": 0}}
    page.js("document.querySelector('[name=usage-by][value=key]').click()")
    page.until_reads("#usage-table", "Nothing was used in these days.")


def test_what_a_gateway_serves_is_in_its_usage_a_little_later(server: ServerProcess, open_view: PageMaker) -> None:
    body = {"model": "embedded", "prompt": "Count.", "max_tokens": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=PATIENCE).raise_for_status()
    eventually(lambda: "demo" in [row["tenant"] for row in server.admin("usage")["rows"]])
    page = open_view("usage")
    page.until_reads("#usage-table", "demo")
    assert page.complaints() == []
    reply = httpx.get(f"{server.admin_url}/admin/v1/usage.csv", headers=server.admin_headers)
    assert reply.headers["content-type"].startswith("text/csv")
    assert reply.text.startswith("day,tenant,requests,")
    assert httpx.get(f"{server.admin_url}/admin/v1/usage.csv").status_code == 401
