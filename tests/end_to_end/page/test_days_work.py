"""An admin's day, by page and by command, against a gateway that serves: a new team, a slow request, a leaked key, a
limit that is raised and reverted, and a CSV for finance. Each task takes three commands at most.
"""

import csv
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.page.page_object import Page, PageMaker
from tests.gateway.raw_client import completion
from tests.gateway.server_process import ServerProcess, bearer, eventually, running_server

POLICY = """\
# what every team may do
defaults:
  price: {input: 1/1M, output: 2/1M, currency: USD}  # agreed with finance
  usage: {by: [user, session, metadata.project]}
tenants:
  ops:
    limits: {requests: 600/min}  # the on-call tools
"""
TEAM = "  research:\n    limits: {cost: 100/month, requests: 60/min}\n"
MODELS = '{"models": ["embedded"]}'
MAX_COMMANDS = 3


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    directory = tmp_path_factory.mktemp("office")
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    flags = ("--policy", str(policy), "--machine-price", "3.50 USD/h", "--threads", "1", "--policy-edits", "on")
    with running_server(directory, *flags) as server:
        yield server, policy


@pytest.fixture
def desk(office: tuple[ServerProcess, Path], open_tab: PageMaker) -> Page:
    server, _ = office
    page = open_tab(server.admin_url, "#/keys")
    page.sign_in(server.admin_key)
    page.until_shown("#keys-table tbody tr")
    return page


class Commands:
    """Counts what an admin types."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, self.count = server, 0

    def curl(self, path: str, body: dict[str, Any] | None = None) -> Any:
        self.count += 1
        reply = self.server.ask_admin(path, "GET" if body is None else "POST", json=body)
        assert reply.status_code == 200, reply.text
        return reply.text if ".csv" in path else reply.json()

    def sluice(self, *words: str) -> list[str]:
        self.count += 1
        command = [
            sys.executable,
            "-m",
            "gateway.cli.main",
            *words,
            "--state-dir",
            str(self.server.log.parent / "state"),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def use(server: ServerProcess, key: str, **fields: Any) -> int:
    return server.post("/v1/completions", key=key, **completion(max_tokens=2), **fields).status_code


def open_tenant(page: Page, tenant: str) -> None:
    page.click("#views [href='#/policy']")
    page.until_shown("#policy-classes table")
    page.fill("#policy-tenant", tenant)
    page.click("#policy-open button")
    page.until(f"document.querySelector('#policy-edit').value.includes({tenant!r})")


def make_key(page: Page, tenant: str, name: str, limits: str) -> str:
    page.click("#key-create")
    page.fill("#key-tenant", tenant)
    page.fill("#key-name", name)
    page.fill("#key-limits", limits)
    page.fill("#key-tags", f"project={name}")
    page.click("#key-dialog .primary")
    page.until_shown("#key-secret")
    secret = page.text("#key-secret")
    page.press("Escape")
    page.until_gone("#key-dialog")
    return secret


def test_a_new_team_gets_three_keys_and_a_monthly_budget(office: tuple[ServerProcess, Path], desk: Page) -> None:
    server, policy = office
    open_tenant(desk, "research")
    desk.fill("#policy-edit", TEAM)
    desk.click("#policy-put")
    desk.until_reads("#policy-checked", "It is in force, and in the file.")
    assert policy.read_text() == POLICY + TEAM
    desk.click("#views [href='#/keys']")
    keys = [make_key(desk, "research", name, "cost: 20/month") for name in ("search", "chat", "night")]
    assert [use(server, key) for key in keys] == [200] * 3
    desk.click("#views [href='#/usage']")
    desk.until("document.querySelectorAll('#usage-budgets tbody tr').length >= 4")  # the team's, and each key's
    assert "research" in desk.column("#usage-budgets")

    by = Commands(server)
    source = by.curl("policy/source?tenant=sales")
    edit = {
        "file": source["file"],
        "digest": source["digest"],
        "tenant": "sales",
        "text": "  sales: {limits: {cost: 9/day}}\n",
    }
    assert by.curl("policy/source", edit)["written"]
    made = by.sluice("keys", "create", "sales", "--name", "a", "--name", "b", "--name", "c", "--settings", MODELS)
    assert (len(made), by.count) == (3, MAX_COMMANDS)
    eventually(lambda: [use(server, key) for key in made] == [200] * 3)
    assert {row["name"] for row in server.admin("keys?contains=sales")["keys"]} == {"a", "b", "c"}


def test_a_slow_request_is_found_with_the_reason(office: tuple[ServerProcess, Path], desk: Page) -> None:
    server, _ = office
    slow = server.post("/v1/completions", **completion(max_tokens=200), stop=None)
    assert slow.status_code == 200
    name = slow.headers["x-request-id"]
    desk.click("#views [href='#/log']")
    desk.fill("[name=min_seconds]", "1ms")
    desk.click("#log-search .primary")
    desk.until_reads("#log-table", name[:10])
    desk.click(f"#log-table tbody .link[title*='{name[:10]}'], #log-table tbody tr .link")
    desk.until_shown("#request-dialog .lanes")
    assert "decode" in desk.texts("#request-dialog .what")

    by = Commands(server)
    found = by.curl("request-log?since=24h&min_seconds=1ms&tenant=demo")["requests"]
    timeline = by.curl(f"requests/{found[0]['id']}")["timeline"]
    assert {"queue", "prefill", "decode"} <= {span["what"] for span in timeline}
    assert by.count <= MAX_COMMANDS


def test_a_leaked_key_is_revoked(office: tuple[ServerProcess, Path], desk: Page) -> None:
    server, _ = office
    leaked, other = (server.ask_admin("keys", "POST", json={"tenant": "ops"}).json() for _ in range(2))
    desk.fill("#filter", leaked["id"])
    desk.click(f"[aria-label='Revoke key {leaked['id']}']")
    desk.click("#key-dialog .danger")
    desk.until_gone("#key-dialog")
    by = Commands(server)
    assert by.curl(f"keys/{other['id']}/revoke", {}) == {"revoked": True}
    assert [use(server, key["key"]) for key in (leaked, other)] == [401, 401]
    assert by.count <= MAX_COMMANDS


def test_a_limit_is_raised_and_reverted(office: tuple[ServerProcess, Path], desk: Page) -> None:
    server, policy = office
    before = policy.read_text()
    assert use(server, server.ask_admin("keys", "POST", json={"tenant": "ops"}).json()["key"]) == 200
    open_tenant(desk, "ops")
    desk.fill("#policy-edit", desk.js("document.querySelector('#policy-edit').value").replace("600/min", "900/min"))
    desk.click("#policy-check")
    desk.until_reads("#policy-checked", "requests: 600/min \u2192 900/min")
    desk.click("#policy-what-if")  # one click away, for the lines of a tenant too
    desk.until_reads("#policy-checked", "What it would have done to the last hour")
    desk.js("[1, 2].forEach(() => document.querySelector('#policy-put').click())")  # a double click
    desk.until_reads("#policy-checked", "It is in force, and in the file.")
    asked = desk.js("performance.getEntriesByType('resource').map(({ name }) => name)")
    assert sum(name.endswith("policy/source") for name in asked) == 3, "a check, another for what-if, and one edit"
    assert policy.read_text() == before.replace("600/min", "900/min"), "comments and all else stay"
    number = server.admin("policy")["edits"][0]["edit"]
    desk.click(f"#policy-history button:text-is('Undo edit {number}')")
    eventually(lambda: policy.read_text() == before)

    by = Commands(server)
    source = by.curl("policy/source?tenant=ops")
    edit = {name: source[name] for name in ("file", "digest", "tenant")} | {
        "text": source["text"].replace("600", "700")
    }
    done = by.curl("policy/source", edit)
    assert by.curl("policy/undo", {"edit": done["edit"]})["written"]
    assert (policy.read_text(), by.count) == (before, MAX_COMMANDS)


def test_finance_gets_a_csv_whose_sums_are_the_ledgers(office: tuple[ServerProcess, Path], desk: Page) -> None:
    server, _ = office
    tags = {"tags": {"project": "search"}}
    key = server.ask_admin("keys", "POST", json={"tenant": "ops", "settings": tags}).json()["key"]
    task = bearer(key) | {"x-sluice-session": "task 7"}
    assert httpx.post(f"{server.url}/v1/completions", json=completion(max_tokens=2), headers=task).status_code == 200
    for user, project in (("ada", "search"), ("bob", "chat"), ("=1+1", "search")):
        assert use(server, key, user=user, metadata={"project": project}) == 200
    eventually(lambda: "=1+1" in {row["value"] for row in server.admin("usage?by=user")["rows"]})
    sessions = {(row["tenant"], row["value"]): row["requests"] for row in server.admin("usage?by=session")["rows"]}
    assert sessions["ops", "task 7"] == 1
    desk.click("#views [href='#/usage']")
    desk.click("[name=usage-by][value=metadata]")
    desk.type("project")
    desk.press("Enter")
    desk.until("[...document.querySelectorAll('#usage-table tbody td')].some(cell => cell.innerText === 'chat')")
    name, text = desk.download("#usage-csv")
    assert (name.startswith("usage-"), text.split("\n")[0][:26]) == (True, "day,tenant,metadata.project"[:26])
    desk.until_reads("#bill-table", "ops")
    _, bill = desk.download("#bill-csv")
    parts = [Decimal(row["cost"]) for row in csv.DictReader(StringIO(bill))]
    assert min(parts) >= 0 and bill.count("(idle)") == len({line[:10] for line in bill.split("\n")[1:] if line})

    by = Commands(server)
    for what in ("tenant", "team", "key", "model", "class", "user", "session", "metadata.project", "tag.project"):
        rows = list(csv.DictReader(StringIO(Commands(server).curl(f"usage.csv?by={what}"))))
        report = server.admin(f"usage?by={what}")
        summed = [sum(int(row[field]) for row in rows) for field in ("requests", "input_tokens", "output_tokens")]
        assert summed == [report["total"][field] for field in ("requests", "input_tokens", "output_tokens")]
        assert sum(Decimal(row["cost"] or 0) for row in rows) == Decimal(report["total"]["costs"]["USD"])
    told = by.curl("usage.csv?by=user")
    assert "'=1+1" in told, "no name is a formula"
    assert by.count <= MAX_COMMANDS


def test_a_keys_own_settings_hold_and_are_edited_on_the_page(office: tuple[ServerProcess, Path], desk: Page) -> None:
    server, _ = office
    own = {"limits": {"requests": "1/h"}, "classes": ["batch"], "models": ["other"]}
    made = server.ask_admin("keys", "POST", json={"tenant": "ops", "settings": own}).json()
    assert server.get("/v1/models", made["key"]).json()["data"] == []
    desk.fill("#filter", made["id"])
    desk.click(f"[aria-label='Edit key {made['id']}']")
    assert desk.js("document.querySelector('#key-limits').value") == "requests: 1/h"
    desk.fill("#key-models", "")
    desk.fill("#key-limits", "requests: none")
    desk.click("#key-dialog .primary")
    desk.until_reads("#key-dialog .problem", "limits.requests")
    desk.fill("#key-limits", "requests: {rate: 1/h, burst: 1}")
    desk.click("#key-dialog .primary")
    desk.until_gone("#key-dialog")
    assert [model["id"] for model in server.get("/v1/models", made["key"]).json()["data"]] == ["embedded"]
    refused = server.post("/v1/completions", key=made["key"], **completion(), service_tier="priority")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "class_not_allowed")
    assert [use(server, made["key"], service_tier="flex") for _ in range(2)] == [200, 429]


BROKEN_ONCE = """
    addEventListener("unhandledrejection", (event) => event.preventDefault());
    const { stringify } = JSON;
    JSON.stringify = (value, ...more) => {
      if (value?.text === undefined) return stringify(value, ...more);
      JSON.stringify = stringify;
      throw new Error("no such thing");
    };
"""


def test_an_edit_that_could_not_be_sent_is_sent_at_the_next_press(
    office: tuple[ServerProcess, Path], desk: Page
) -> None:
    _, policy = office
    open_tenant(desk, "spare")
    for button in ("what-if", "put"):
        desk.js(f"() => {{{BROKEN_ONCE}}}")
        desk.js(f"document.querySelector('#policy-{button}').click()")
        desk.until("!document.querySelector('#policy-what-if').disabled")
    desk.click("#policy-put")
    desk.until_reads("#policy-checked", "It is in force, and in the file.")
    assert "spare:" in policy.read_text()
