"""The view of the policy shows what is in force and what was changed when, and checks an edit."""

import pytest

from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.page_object import Page, PageMaker

HOSTILE = "<img src=x onerror=document.title=1>"


@pytest.fixture
def policy(open_board: PageMaker) -> Page:
    page = open_board("policy")
    page.until_shown("#policy-classes table")
    return page


def write(page: Page, text: str) -> None:
    page.fill("#policy-edit", text)
    page.click("#policy-check")


def test_what_is_in_force_and_what_was_changed_when(policy: Page, gateway: FakeGateway) -> None:
    assert policy.js("document.querySelector('#view-now').hidden")
    assert policy.attributes("#views [aria-current]", "href") == ["#/policy"]
    assert policy.column("#policy-tenants", 1) == ["all others", "acme", "globex"]
    assert "tokens 100k/min and 20M/day" in policy.column("#policy-tenants", 4)[1]
    assert "0.5/1M in, 2/1M out, EUR" in policy.column("#policy-tenants", 6)[1]
    editions = policy.texts("#policy-history summary")
    assert ["1 change" in editions[0], "2 changes" in editions[1], "started with" in editions[2]] == [True] * 3
    policy.click("#policy-history summary")
    policy.until_shown("#policy-history [open] del")
    assert policy.texts("#policy-history [open] :is(del, ins)") == ["1", "3"]
    gateway.answers["policy"] |= {"version": "next", "history": []}
    gateway.answers["overview"] |= {"policy": {"version": "next", "problem": None}}
    policy.until_reads("#in-force-facts", "Version next")  # by itself


def test_an_edit_is_checked_and_what_it_would_change_is_shown(policy: Page) -> None:
    policy.click("#policy-start")
    policy.until("document.querySelector('#policy-edit').value.includes('weight: 3')")
    policy.click("#policy-check")
    policy.until_reads("#policy-checked", "It changes nothing.")
    text = policy.js("document.querySelector('#policy-edit').value")
    write(policy, text.replace("weight: 3", "weight: 5"))
    policy.until_reads("#policy-checked", "It would change:")
    assert policy.texts("#policy-checked .diff li") == ["tenant acme", "weight: 3 \u2192 5"]


def test_what_is_wrong_leads_to_its_line_and_is_text(policy: Page) -> None:
    write(policy, f"tenants:\n  acme: {{wieght: 1}}\n  '{HOSTILE}': {{weight: x}}\n")
    policy.until_reads("#policy-checked", "Not valid: 2 problems.")
    policy.click("#policy-checked .mistakes button")
    marked = "(f => f.value.slice(f.selectionStart, f.selectionEnd))(document.querySelector('#policy-edit'))"
    assert policy.js(marked) == "  acme: {wieght: 1}"
    assert policy.count("#policy-checked img") == 0
    policy.type("x")
    policy.until("document.querySelector('#policy-checked').innerText === ''")  # it was about another text


def test_a_view_survives_a_reload_and_fits_a_small_screen(open_page: PageMaker, policy: Page) -> None:
    policy.reload()
    policy.until("document.querySelector('#policy-classes table') && document.querySelector('#sign-in').hidden")
    policy.until_it_fits(400, 800)
    policy.click("#views [href='#/now']")
    policy.until("!document.querySelector('#view-now').hidden && document.querySelector('#tenants tbody tr')")
