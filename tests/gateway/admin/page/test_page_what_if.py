"""A gateway that has served a few requests tells what an edit would have done to the last hour."""

import httpx

from tests.gateway.admin.page.page_object import PageMaker
from tests.gateway.server_process import PATIENCE, ServerProcess

EDIT = "tenants:\n  demo: {limits: {requests: {rate: 1/h, burst: 1}}}\n  nobody: {weight: 2}\n"


def test_an_edit_is_simulated_on_what_was_served_and_says_what_it_leaves_out(
    server: ServerProcess, open_view: PageMaker
) -> None:
    body = {"model": "embedded", "prompt": "Count.", "max_tokens": 3}
    for _ in range(3):
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=PATIENCE)
        reply.raise_for_status()
    page = open_view("policy")
    page.until_shown("#policy-classes table")
    page.fill("#policy-edit", EDIT)
    page.click("#policy-what-if")
    page.until_reads("#policy-checked", "Simulated: ")
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


def test_the_api_refuses_what_is_no_policy_and_answers_in_figures(server: ServerProcess) -> None:
    url = f"{server.admin_url}/admin/v1/policy/what-if"
    bad = httpx.post(url, json={"text": "tenants: 3"}, headers=server.admin_headers, timeout=PATIENCE)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "text")
    same = httpx.post(url, json={"text": "tenants: {demo: {}}"}, headers=server.admin_headers, timeout=PATIENCE).json()
    assert same["requests"] + same["left_out"] >= 1
    assert same["before"]["completed"] == same["after"]["completed"]
