"""The board shows what a busy gateway does and how fresh that is, after a sign-in with the admin key."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.page import page_data
from tests.end_to_end.page.fake_gateway import KEY, FakeGateway
from tests.end_to_end.page.page_data import NUM_BLOCKS, ended, kv_in_uses
from tests.end_to_end.page.page_object import Page, PageMaker

REJECTED = "network: Failed to load resource: the server responded with a status of 401 (Unauthorized)"
STORED = "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"


def test_a_key_is_asked_for_and_a_wrong_one_is_refused_in_words_not_kept_and_typed_over(open_page: PageMaker) -> None:
    page = open_page()
    assert "Admin key" in page.text("body")
    assert page.js("document.activeElement.id") == "admin-key"
    assert not any("/admin/" in url for url in page.requested())
    page.sign_in("sk-of-a-tenant")
    page.until_reads("#sign-in-problem", "This key is not accepted.")
    assert page.js(STORED) == '[{},{},""]'
    assert page.complaints() == [REJECTED]
    page.js("document.querySelector('#sign-in-problem').textContent = ''")
    page.type(KEY + "\N{ZERO WIDTH SPACE}")  # what was wrong is selected; no header can hold this
    page.press("Enter")
    page.until_reads("#sign-in-problem", "This key is not accepted.")
    page.type(KEY)
    page.press("Enter")
    page.until("document.querySelector('.line')")


def test_the_key_is_kept_in_this_tab_only_until_it_signs_out_and_survives_a_reload(
    board: Page, open_page: PageMaker
) -> None:
    assert board.js(STORED) == f'[{{"sluice-admin-key":"{KEY}"}},{{}},""]'
    assert board.js("document.querySelector('#admin-key').value") == ""
    board.reload()
    board.until("document.querySelector('.line') && document.querySelector('#sign-in').hidden")
    assert open_page().js(STORED) == '[{},{},""]'
    board.click("#sign-out")
    board.until("!document.querySelector('#sign-in').hidden && document.querySelector('#board').hidden")
    assert board.js(STORED) == '[{},{},""]'


@pytest.mark.nightly
def test_a_key_that_is_changed_while_the_page_is_open_is_asked_for_again(board: Page, gateway: FakeGateway) -> None:
    gateway.stop()
    gateway.use_key("another")
    gateway.start()
    board.until("!document.querySelector('#try-now').hidden || !document.querySelector('#sign-in').hidden")
    board.until_reads("#sign-in-problem", "The key is no longer accepted.")
    assert board.js(STORED) == '[{},{},""]'
    board.sign_in("another")
    board.until_shown("#board")


def test_a_gateway_that_is_gone_is_not_a_wrong_key(open_page: PageMaker, gateway: FakeGateway) -> None:
    page = open_page()
    gateway.stop()
    page.sign_in(KEY)
    page.until_reads("#sign-in-problem", "The gateway cannot be reached: no answer.")
    gateway.start()


@pytest.mark.nightly
def test_a_store_that_is_gone_a_policy_that_was_not_taken_and_a_drain_stand_at_the_top(
    board: Page, gateway: FakeGateway
) -> None:
    policy = {"version": "9f3c2a71", "problem": "line 3: unknown field wieght"}
    gateway.answers["overview"] |= {"store": "unavailable", "policy": policy, "draining": True}
    board.until_count("#problems li.serious", 2)
    board.until_reads("#problems", "2 serious, 2 warnings")  # the finding is the second one
    board.click("#problems summary")
    problems = board.text("#problems")
    assert "The store does not answer" in problems
    assert "line 3: unknown field wieght" in problems
    assert "Draining: nothing new is taken; 41 sequences still running." in problems
    assert board.js("document.title").startswith("Draining · ")


@pytest.mark.nightly
def test_several_troubles_are_one_line_that_counts_and_unfolds(gateway: FakeGateway, open_board: PageMaker) -> None:
    finding = gateway.answers["diagnosis"]["findings"][0]
    gateway.answers["diagnosis"] = {"findings": [finding | {"trouble": f"trouble {n}"} for n in range(9)]}
    gateway.answers["overview"] |= {"store": "unavailable"}
    board = open_board()
    board.until_reads("#problems", "1 serious, 9 warnings")
    height = board.box("#problems")[3]
    assert height < 40
    assert "The store does not answer" in board.text("#problems")  # the most serious one is named
    board.click("#problems summary")
    board.until(f"document.querySelector('#problems').clientHeight > {2 * height}")
    board.press("Enter")  # the focus is on it
    board.until(f"document.querySelector('#problems').clientHeight <= {height + 1}")


@pytest.mark.nightly
def test_a_trouble_that_others_come_of_counts_once_and_stands_above_them(
    gateway: FakeGateway, open_board: PageMaker
) -> None:
    finding = gateway.answers["diagnosis"]["findings"][0] | {"name": "small_batches", "trouble": "memory is short"}
    others = [finding | {"trouble": f"trouble {n}", "cause": "small_batches", "severity": "serious"} for n in range(5)]
    apart = finding | {"name": "late_loop", "trouble": "the loop is late"}
    gateway.answers["diagnosis"] = {"findings": [finding, *others, apart]}
    board = open_board()
    board.until_reads("#problems summary", "1 serious, 1 warning")
    assert board.text("#problems summary span") == "memory is short."
    assert board.js("document.querySelector('#problems summary').scrollWidth <= innerWidth")
    board.click("#problems summary")
    board.until_count("#problems > ul > li", 2)
    assert board.count("#problems > ul > li.serious li") == 5
    assert "With it: trouble 4 (interactive waits 0.9 s" in board.text("#problems > ul > li.serious")
    gateway.answers["diagnosis"] = {"findings": [apart]}
    board.until_count("#problems li li", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("width", [500, 800, 1280])
def test_the_words_of_a_trouble_are_not_cut(gateway: FakeGateway, open_board: PageMaker, width: int) -> None:
    words = "this replica does not know the others' service: fairness holds on each replica alone"
    gateway.answers["diagnosis"]["findings"][0]["trouble"] = words
    board = open_board(width=width)
    board.until_reads("#problems", f"{words}.")
    style = board.js(
        "(({overflow, textOverflow}) => [overflow, textOverflow])(getComputedStyle("
        "document.querySelector('#problems summary')))"
    )
    assert style == ["visible", "clip"]


@pytest.mark.nightly
def test_a_trouble_that_comes_moves_nothing(gateway: FakeGateway, open_board: PageMaker) -> None:
    gateway.answers["diagnosis"] = {"findings": []}
    board = open_board()
    board.until_reads("#problems", "No trouble")
    height = board.box("#problems")[3]
    gateway.answers["overview"] |= {"store": "unavailable"}
    board.until_reads("#problems", "Serious")
    assert board.box("#problems")[3] == height


def show_lines(gateway: FakeGateway, change: Callable[[list[Any]], list[Any]]) -> None:
    points = gateway.answers["overview"]["series"]["points"]
    changed = {name: change(values) for name, values in points.items() if name != "waiting"} | {"waiting": {}}
    gateway.answers["overview"] |= {"series": {"seconds": 1, "end": 0, "points": changed}}


@pytest.mark.nightly
def test_a_chart_of_nothing_says_so_and_a_young_gateway_has_short_lines_at_the_right(
    board: Page, gateway: FakeGateway
) -> None:
    show_lines(gateway, lambda values: [None] * 300)
    board.until_count(
        "[aria-label='Time to first token, last five minutes. p50: nothing. p99: nothing. oldest waits: nothing.']", 1
    )
    assert board.attributes(".chart > svg .line", "d")[0] == ""
    gateway.answers["overview"] = page_data.overview()
    show_lines(gateway, lambda values: values[-2:])
    board.until("document.querySelector('.chart > svg .line').getAttribute('d').split('h0').length === 3")
    width = board.js("document.querySelector('.chart > svg').clientWidth")
    assert float(board.attributes(".chart > svg .line", "d")[0][1:].split()[0]) > width - 12


@pytest.mark.nightly
def test_pointing_at_a_chart_reads_one_second_in_all_of_them(board: Page) -> None:
    left, top, width, _ = board.box(".chart > svg")
    before = board.texts(".legend b")
    board.move(left + 52 + (width - 60) * 0.7, top + 40)  # 90 s ago: amid the burst
    board.until_count(".pointer.away", 0)
    assert all(after != then for then, after in zip(before[4:8], board.texts(".legend b")[4:8], strict=True))
    board.move(2, 2)
    board.until_count(".pointer.away", 6)
    assert board.texts(".legend b") == before


@pytest.mark.nightly
def test_the_pool_tells_what_blocks_are_used_for_and_a_pointer_whose_each_is(board: Page, gateway: FakeGateway) -> None:
    assert board.texts(".pool-uses li") == [], "nothing is cached: there is nothing to tell apart"
    gateway.answers["kv"] = kv_in_uses()
    board.until_count(".pool-uses li", 6)
    uses = [" ".join(text.split()) for text in board.texts(".pool-uses li")]
    names = ["held", "shared", "reserved", "idle", "pinned"]
    assert [text.split()[0] for text in uses] == [*names, "swapped"]
    assert uses[5] == "swapped 64 MiB 25 %"
    drawn = [board.attributes(f".pool .{use}", "d")[0].split("z")[0] for use in names]
    assert [re.sub(r"[^a-zA-Z]", "", path) for path in drawn] == ["Mhvh", "Mhlvh", "Mlh", "Mhvh", "Mlll"]
    square, idle = (float(path.split("h")[1].split("v")[0]) for path in (drawn[0], drawn[3]))
    assert idle == square / 2
    acme = board.text(".pool-legend li .parts").replace("\u00a0", " ")
    assert all(words in acme for words in ("shared", "reserved", "pinned", "idle", "kept 16 MiB", "swapped 50 MiB"))
    gateway.answers["kv"] = page_data.kv() | {"owners": ["acme"], "runs": [[0, NUM_BLOCKS, 3]]}
    board.until("document.querySelectorAll('.pool .idle').length === 1 && !document.querySelector('.pool .held')")
    x, y, _, _ = board.box(".pool")
    board.move(x + 4, y + 4)
    board.until_reads(".pool-reading", "Block 0: acme, idle, and cached for prompts with the same beginning")
    gateway.answers["kv"] |= {"num_blocks": 200_000, "owners": ["acme"], "runs": [[0, 150_000], [-1, 50_000]]}
    board.until_reads("#pool-scale", "shown as whose most of them are")
    assert board.js("document.querySelector('.pool').clientHeight") <= 216
    assert board.texts(".pool-legend b") == ["75 %", "25 %"]


def test_the_filter_leaves_what_contains_its_words_and_ended_requests_are_one_choice_away(board: Page) -> None:
    board.click("[name=which][value=recent]")
    assert board.js("document.querySelector('#live').hidden")
    assert board.column("#recent", 3)[0] == "refused · 429 · rate_limit_exceeded"
    assert len(board.column("#recent")) == 12
    board.click("[name=which][value=live]")
    board.click("#filter")
    board.type("Glob")
    board.until_count("#tenants tbody tr", 1)
    assert set(board.column("#live", 2)) == {"globex"}
    assert set(board.column("#refusals", 2)) == {"globex"}


def test_one_part_that_fails_is_named_and_the_rest_goes_on(board: Page, gateway: FakeGateway) -> None:
    del gateway.answers["kv"]
    board.click("#problems summary")
    board.until_reads("#problems", "What is shown of kv is old: kv is broken.")
    gateway.show_requests(recent=(ended(1, "newcomer"),))
    board.until_reads("#live", "No request is live.")
    assert "Live" in board.text("#freshness")


STATE = "document.documentElement.dataset.state"


def test_a_gateway_that_does_not_answer_makes_the_page_stale_and_it_says_since_when(
    board: Page, gateway: FakeGateway
) -> None:
    gateway.stop()
    board.until(f"{STATE} === 'stale'")
    said = board.text("#freshness")
    assert re.fullmatch(r"Stale since \d\d:\d\d:\d\d \(\d+ s\): no answer\. Next try in \d+ s\.", said)
    assert board.js("document.title").startswith("No answer · ")
    assert board.text("#announcer") == "The gateway does not answer."
    assert "acme" in board.text("#tenants")  # what was known stays
    gateway.start()
    board.click("#try-now")
    board.until(f"{STATE} === 'live'")
    assert board.text("#announcer") == "The gateway answers again."
    assert board.js("document.querySelector('#try-now').hidden")


def test_a_page_that_is_paused_stands_still_until_it_is_told_to_go_on(board: Page, gateway: FakeGateway) -> None:
    board.click("#pause")
    assert board.js(STATE) == "paused"
    assert board.text("#freshness").startswith("Paused since ")
    gateway.answers["overview"] |= {"model": "another"}
    assert board.text("#model") == "qwen3-0.6b"
    board.click("#pause")
    board.until_reads("#model", "another")
    assert board.js(STATE) == "live"
