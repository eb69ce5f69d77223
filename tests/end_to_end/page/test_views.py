"""The views of keys, of the policy and of usage, on small screens and with hostile names too."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.page import page_data
from tests.end_to_end.page.fake_gateway import FakeGateway
from tests.end_to_end.page.page_object import Page, PageMaker
from tests.gateway.raw_client import completion
from tests.gateway.server_process import ServerProcess, eventually, running_server

Json = dict[str, Any]

HOSTILE = "<img src=x onerror=document.title=1>"


@pytest.fixture
def keys(open_view: PageMaker) -> Page:
    page = open_view("keys")
    page.until_shown("#keys-table tbody tr")
    return page


def status(server: ServerProcess, key: str) -> int:
    return server.get("/v1/limits", key).status_code


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


def test_an_edit_of_a_key_changes_no_address_and_nothing_that_another_tab_has_edited(
    server: ServerProcess, keys: Page
) -> None:
    keys.resize(1440)
    limits = {"requests": {"budget": "5/day", "alerts": [{"at": "80%", "url": "https://hooks.example.com/a,b"}]}}
    asked = {"tenant": "acme", "unnamed": True, "settings": {"limits": limits}}
    made = server.ask_admin("keys", "POST", json=asked).json()
    edit = f"[aria-label='Edit key {made['id']}']"
    keys.fill("#filter", made["id"])
    keys.until_reads("#keys-table", "requests 5/day (alerts at 80%)")
    keys.click(edit)
    assert "/a,b" in keys.js("document.querySelector('#key-limits').value")
    server.ask_admin(f"keys/{made['id']}/edit", "POST", json={"name": "another tab's"})
    keys.fill("#key-tags", "project=search")
    keys.click("#key-dialog .primary")
    keys.until_reads("#key-dialog .problem", "was edited since you read it")
    keys.press("Escape")
    keys.until(f'{row(made["id"])}.innerText.includes("another tab\'s")')
    keys.click(edit)
    keys.fill("#key-tags", "project=search")
    keys.click("#key-dialog .primary")
    keys.until_gone("#key-dialog")
    (now,) = server.admin(f"keys?contains={made['id']}")["keys"]
    assert (now["name"], now["settings"]) == ("another tab's", {"limits": limits, "tags": {"project": "search"}})


@pytest.mark.nightly
def test_a_key_is_made_without_a_mouse_and_bad_input_is_told_in_words(server: ServerProcess, keys: Page) -> None:
    keys.tab_to("#key-create")
    keys.press("Enter")
    keys.type("not a tenant!")
    keys.press("Enter")
    keys.until_reads("#key-dialog .problem", "Not done: tenant:")
    assert keys.js("document.querySelector('#key-dialog').open")
    keys.press("Escape")
    keys.until_gone("#key-dialog")


@pytest.mark.nightly
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


@pytest.fixture
def policy(open_board: PageMaker) -> Page:
    page = open_board("policy")
    page.until_shown("#policy-classes table")
    return page


def write(page: Page, text: str) -> None:
    page.fill("#policy-edit", text)
    page.click("#policy-check")


def test_a_policy_is_shown_as_it_is_in_force_and_edits_are_checked(policy: Page, gateway: FakeGateway) -> None:
    assert policy.js("document.querySelector('#view-now').hidden")
    assert policy.attributes("#views [aria-current]", "href") == ["#/policy"]
    assert policy.column("#policy-tenants", 1) == ["all others", "acme", "globex"]
    assert "tokens 100k/min and 20M/day" in policy.column("#policy-tenants", 4)[1]
    assert "0.5/1M in, 2/1M out, EUR" in policy.column("#policy-tenants", 6)[1]
    cached = ["", "64MiB kept, at most 1GiB, shared in friends", "shared in friends"]
    assert policy.column("#policy-tenants", 9) == cached
    editions = policy.texts("#policy-history summary")
    assert ["1 change" in editions[0], "2 changes" in editions[1], "started with" in editions[2]] == [True] * 3
    policy.click("#policy-history summary")
    policy.until_shown("#policy-history [open] del")
    assert policy.texts("#policy-history [open] :is(del, ins)") == ["1", "3"]
    gateway.answers["policy"] |= {"version": "next", "history": []}
    gateway.answers["overview"] |= {"policy": {"version": "next", "problem": None}}
    policy.until_reads("#in-force-facts", "Version next")  # by itself

    policy.click("#policy-start")
    policy.until("document.querySelector('#policy-edit').value.includes('weight: 3')")
    policy.click("#policy-check")
    policy.until_reads("#policy-checked", "It changes nothing.")
    text = policy.js("document.querySelector('#policy-edit').value")
    write(policy, text.replace("weight: 3", "weight: 5"))
    policy.until_reads("#policy-checked", "It would change:")
    assert policy.texts("#policy-checked .diff li") == ["tenant acme", "weight: 3 \u2192 5"]

    write(policy, f"tenants:\n  acme: {{wieght: 1}}\n  '{HOSTILE}': {{weight: x}}\n")
    policy.until_reads("#policy-checked", "Not valid: 2 problems.")
    policy.click("#policy-checked .mistakes button")
    marked = "(f => f.value.slice(f.selectionStart, f.selectionEnd))(document.querySelector('#policy-edit'))"
    assert policy.js(marked) == "  acme: {wieght: 1}"
    assert policy.count("#policy-checked img") == 0
    policy.type("x")
    policy.until("document.querySelector('#policy-checked').innerText === ''")  # it was about another text


@pytest.mark.nightly
def test_a_view_survives_a_reload_and_fits_a_small_screen(open_page: PageMaker, policy: Page) -> None:
    policy.reload()
    policy.until("document.querySelector('#policy-classes table') && document.querySelector('#sign-in').hidden")
    policy.until_it_fits(400, 800)
    policy.click("#views [href='#/now']")
    policy.until("!document.querySelector('#view-now').hidden && document.querySelector('#tenants tbody tr')")


NAMES = (HOSTILE, "x" * 200, *(f"tenant-{number:03d}" for number in range(300)))


def test_totals_days_tenants_and_budgets_are_told_for_a_period_and_downloaded(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    page = open_board("usage")
    page.until_count("#usage-table tbody tr", 10)
    assert "Cost\n51.72 EUR" in page.text("#usage-totals")
    assert page.column("#usage-table")[0] == "acme"
    assert page.column("#usage-table", 8)[:4] == ["51.72 EUR", "13.94 EUR", "11.00 EUR", ""]  # the last has no price
    assert (page.count("#usage-days rect"), page.count("#usage-costs rect")) == (42, 21)
    assert page.attributes("#usage-costs .days", "aria-label")[0].startswith("Cost by day. 2026-09-01: ")
    page.until_reads("#bill-totals", "1,628.25 USD")
    assert page.column("#bill-table", 4)[:2] == ["87.50 USD", "21.88 USD"]
    assert page.attributes(".days", "aria-label")[0].startswith("Tokens by day. 2026-09-01: ")
    assert page.column("#usage-budgets", 4)[0] == "300,000 (3 %)"
    assert page.column("#usage-budgets", 4)[5] == "unknown"
    assert page.count("#usage-budgets .low") == 1
    assert page.column("#usage-budgets", 6)[:3] == ["12 k set aside, 4,000 lost", "4,000 lost", ""]
    page.click("[name=usage-by][value=key]")
    page.until_asked("by=key")
    gateway.answers["usage"] |= {"by": "metadata.project", "rows": page_data.groups(("search", "", None))}
    gateway.answers["usage"] |= {"bill": page_data.bill() | {"currency": None}}
    page.click("[name=usage-by][value=metadata]")
    page.type("project")
    page.press("Enter")
    page.until_reads("#usage-table thead", "metadata: project")
    page.until("document.querySelector('#usage-table tbody').innerText.includes('all others')")
    assert sorted(page.column("#usage-table", 2)) == ["all others", "none", "search"]
    widths = page.js("[...document.querySelectorAll('#usage-table thead .stretches')].map(cell => cell.offsetWidth)")
    assert abs(widths[0] - widths[1]) <= 20, "names of both have room"
    page.until_reads("#bill-totals", "At 3.50 an hour\n1,764.00")

    page.fill("#usage-from", "2026-09-01")
    page.until_asked("from=2026-09-01")
    assert page.js("document.querySelector('#usage-preset').value") == "As chosen"
    name, text = page.download("#usage-csv")
    assert text == "day,tenant\n2026-09-01,acme\n"
    page.until_asked("usage.csv?from=2026-09-01")
    assert name.startswith("usage-2026-09-01-")


def test_a_day_that_is_half_typed_stays_and_the_period_before_is_asked_for(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    page = open_board("usage")
    page.until_count("#usage-table tbody tr", 10)
    asked = gateway.queries["usage"]
    page.js("document.querySelector('#usage-from').focus()")
    page.press("Backspace")
    page.js("{ const now = performance.now.bind(performance); performance.now = () => now() + 60000; }")  # it is due
    page.until("performance.getEntriesByType('resource').filter(({ name }) => name.includes('v1/usage?')).length === 2")
    assert page.js("document.querySelector('#usage-from').value") == ""
    assert gateway.queries["usage"] == asked
    page.download("#usage-csv")
    page.until_asked(f"usage.csv?from={asked['from']}")


def test_damaged_values_are_told(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers["budgets"]["damaged"] = 1
    gateway.answers["budgets"]["budgets"][0] |= {"damaged": True, "left": None}
    page = open_board("usage")
    page.until_reads("#usage-problem", "Values in the quota store are damaged and left out")
    assert page.column("#usage-budgets", 4)[0] == "damaged"


def test_budgets_are_shown_where_the_usage_is_not_answered(gateway: FakeGateway, open_board: PageMaker) -> None:
    del gateway.answers["usage"]
    page = open_board("usage")
    page.until_shown("#usage-budgets tbody tr")
    page.until_reads("#usage-problem", "Not answered: usage is broken.")


def test_what_is_not_answered_is_told_at_once_and_old_answers_are_said_to_be(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    del gateway.answers["budgets"]
    page = open_board("usage")
    page.until_reads("#usage-table", "acme")
    page.until_reads("#usage-problem", "Not answered: budgets is broken.")
    assert page.text("#usage-other") == ""
    is_read = gateway.held["usage"] = threading.Event()
    page.click("[name=usage-by][value=class]")
    page.until_reads("#usage-other", "Below is what was asked for before.")
    eventually(lambda: "usage" not in gateway.held)
    del gateway.answers["usage"]
    page.click("[name=usage-by][value=model]")
    page.until_reads("#usage-problem", "Not answered: usage is broken. Not answered: budgets is broken.")
    assert page.text("#usage-other") == "Below is what was asked for before."
    is_read.set()


def test_a_late_answer_does_not_replace_a_newer_one(gateway: FakeGateway, open_board: PageMaker) -> None:
    usage = gateway.answers["usage"]
    is_read = gateway.held["budgets"] = threading.Event()
    page = open_board("usage")
    page.until_reads("#usage-table", "acme")
    assert page.text("#usage-budgets .foot").strip() == "Being read …", "and no button without words"
    is_late = gateway.held["usage"] = threading.Event()
    gateway.answers["usage"] = usage | {"rows": named(usage["rows"], "older")}
    page.click("[name=usage-by][value=class]")
    eventually(lambda: "usage" not in gateway.held)
    gateway.answers["usage"] = usage | {"rows": named(usage["rows"], "newer")}
    page.click("[name=usage-by][value=tenant]")
    page.until_reads("#usage-table", "newer")
    is_late.set()
    page.until("performance.getEntriesByType('resource').filter(({ name }) => name.includes('v1/usage?')).length === 3")
    assert "newer" in page.text("#usage-table")
    assert page.text("#usage-budgets .foot").strip() == "Being read …", "asked once: they are of no period"
    is_read.set()
    page.until_shown("#usage-budgets tbody tr")


@pytest.mark.nightly
def test_many_long_and_hostile_names_fit_every_screen(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers |= {"usage": page_data.usage(NAMES), "budgets": page_data.budgets(NAMES)}
    page = open_board("usage", width=400)
    page.until_count("#usage-table tbody tr", 25)
    page.until_it_fits(400, 800, 1440)
    assert page.count("main img") == 0
    gateway.answers |= {"usage": page_data.usage(()), "budgets": {"budgets": [], "truncated": 0}}
    page.js("document.querySelector('[name=usage-by][value=key]').click()")
    page.until_reads("#usage-table", "No use on these days.")


HEARD = """(checked => { window.heard = [];
  new MutationObserver(() => window.heard.push(checked.textContent)).observe(checked, {childList: true})
})(document.querySelector("#policy-checked"))"""


@pytest.fixture
def young_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A gateway without requests: every request of the last minutes would be simulated."""
    with running_server(tmp_path, "--threads", "1") as server:
        yield server


EDIT = "tenants:\n  demo: {limits: {requests: {rate: 1/h, burst: 1}}}\n  nobody: {weight: 2}\n"


def test_an_edit_is_simulated_on_what_was_served_and_says_what_it_leaves_out(
    young_server: ServerProcess, open_tab: PageMaker
) -> None:
    server = young_server
    for _ in range(3):
        assert server.post("/v1/completions", **completion(max_tokens=3)).status_code == 200
    refused = server.ask_admin("policy/what-if", "POST", json={"text": "tenants: 3"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")
    page = open_tab(server.admin_url, "#/policy")
    page.sign_in(server.admin_key)
    page.until_shown("#policy-classes table")
    page.fill("#policy-edit", EDIT)
    page.js(HEARD)
    page.click("#policy-what-if")
    page.until_reads("#policy-checked", "Simulated: ")
    simulating = "Simulating, for 0 s so far; it takes up to 10 s on an idle processor, and longer on a busy one…"
    assert page.js("window.heard[0]") == simulating
    cells = page.texts("#policy-checked tbody tr")
    completed = next(row.split("\t") for row in cells if row.startswith("Completed"))
    assert int(completed[1]) > int(completed[2]) >= 1  # the edit's limit has refused some
    told = page.text("#policy-checked")
    assert "nobody" in told and "the trace has no requests of this tenant" in told
    assert "limits begin unused" in told
    page.fill("#policy-edit", "tenants: {acme: {wieght: 1}}")
    page.click("#policy-what-if")
    page.until_reads("#policy-checked", "Not valid: 1 problem.")
    assert page.complaints() == []


def named(rows: list[Json], name: str) -> list[Json]:
    return [rows[0] | {"tenant": name}]


def test_tenants_that_an_answer_leaves_out_are_found_by_the_gateway(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    every = gateway.answers["tenants"]
    gateway.answers["tenants"] = every | {"truncated": 9000}
    gateway.found["tenants", "zed"] = {"tenants": [every["tenants"][0] | {"name": "zed-7"}], "truncated": 0}
    board = open_board()
    board.until_reads("#tenants .foot", "more")
    board.click("#filter")
    board.type("zed")
    board.until("document.querySelector('#tenants tbody tr')?.innerText.includes('zed-7')")
    assert board.count("#tenants tbody tr:not(.gone)") == 1


@pytest.mark.nightly
def test_tenants_of_a_long_policy_usage_and_budgets_are_found_by_the_gateway(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    answers, found = gateway.answers, gateway.found
    effective = answers["policy"]["effective"]
    zed = effective | {"tenants": {"zed-7": next(iter(effective["tenants"].values()))}}
    answers["policy"] |= {"truncated": 9000, "named": 9500}
    answers["usage"] |= {"truncated": 9000}
    answers["budgets"] |= {"truncated": 9000}
    found["policy", "zed"] = answers["policy"] | {"effective": zed, "truncated": 0}
    found["usage", "zed"] = answers["usage"] | {"rows": named(answers["usage"]["rows"], "zed-7"), "truncated": 0}
    found["budgets", "zed"] = {"budgets": named(answers["budgets"]["budgets"], "zed-7"), "truncated": 0}
    board = open_board("policy")
    board.until_reads("#in-force-facts", "9,500 tenants named")
    board.click("#filter")
    board.type("zed")
    board.until("document.querySelector('#policy-tenants tbody')?.innerText.includes('zed-7')")
    board.click("#views [href='#/usage']")
    for table in ("#usage-table", "#usage-budgets"):
        board.until(f"document.querySelector('{table} tbody')?.innerText.includes('zed-7')")


def test_the_log_of_requests_is_searched_page_by_page_and_a_row_opens_its_timeline(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    rows = gateway.answers["request-log"]["requests"]
    rows[0] |= {"tenant": HOSTILE, "model": HOSTILE, "code": HOSTILE}
    page = open_board("log", width=800)
    page.until_count("#log-table tbody tr", len(rows))
    assert gateway.queries["request-log"] == {"since": "24h", "limit": "100"}
    page.until_it_fits(400, 800, 1440)
    assert page.count("main img, main script") == 0
    assert HOSTILE in page.text("#log-table")

    page.fill("#log-tenant", "acme")
    page.fill("#log-status", "5xx")
    page.click("#log-search .primary")
    eventually(lambda: gateway.queries["request-log"].get("status") == "5xx")
    assert gateway.queries["request-log"] == {"since": "24h", "tenant": "acme", "status": "5xx", "limit": "100"}
    page.click("#log-older")
    eventually(lambda: gateway.queries["request-log"].get("before") == "5.5_1")
    page.click("#log-newest")
    eventually(lambda: "before" not in gateway.queries["request-log"])

    page.click("#log-table tbody .link")
    page.until_reads("#request-dialog", "Timeline in words")
    page.press("Escape")
    del gateway.answers["request-log"]
    page.click("#log-search .primary")
    page.until_reads("#log-problem", "Not answered: request-log is broken.")


@pytest.mark.parametrize(("role", "buttons"), [("viewer", 0), ("operator", 1), ("admin", 2)])
def test_an_admin_sees_the_buttons_of_its_role(
    gateway: FakeGateway, open_board: PageMaker, role: str, buttons: int
) -> None:
    gateway.answers["me"] = {"name": HOSTILE, "role": role}
    page = open_board()
    page.until(f"document.body.dataset.role === '{role}'")
    visible = "[...document.querySelectorAll({})].filter(node => node.checkVisibility()).length"
    cancels = page.js(visible.format("'#live .danger'"))
    page.click("#views [href='#/keys']")
    page.until_shown("#keys-table tbody tr")
    makes = page.js(visible.format("'#key-create'"))
    assert ((cancels > 0) + makes, page.count("header img")) == (buttons, 0)
