"""A request is shown with its timeline and its end, in a table that holds still under a reader's pointer."""

import threading
from functools import partial

import pytest

from tests.end_to_end.page.fake_gateway import FakeGateway
from tests.end_to_end.page.page_data import live
from tests.end_to_end.page.page_object import Page, PageMaker
from tests.gateway.raw_client import completion
from tests.gateway.server_process import PATIENCE, ServerProcess, eventually

CANCEL = "#live tbody tr:first-child button[aria-label]"


def test_a_request_is_cancelled_only_after_a_second_press(board: Page, gateway: FakeGateway) -> None:
    for leave in (partial(board.click, "#cancel-dialog .answers button"), partial(board.press, "Escape")):
        board.click(CANCEL)
        board.until_shown("#cancel-dialog")
        leave()
        board.until_gone("#cancel-dialog")
    assert gateway.cancelled == []
    label = board.attributes(CANCEL, "aria-label")[0]
    board.click(CANCEL)
    board.until_shown("#cancel-dialog")
    assert board.text("#cancel-title") == label.split(" of ")[0] + "?"
    assert board.focused() == "Keep it running"
    assert gateway.cancelled == []
    board.click("#cancel-dialog .danger")
    board.until_gone("#cancel-dialog")
    assert len(gateway.cancelled) == 1
    assert gateway.cancelled[0][:10] in label
    assert board.text("#announcer").endswith("is cancelled.")
    board.move(2, 2)
    board.until(f"!document.querySelector('#live').innerText.includes('{gateway.cancelled[0][:10]}')")


@pytest.mark.nightly
def test_a_request_that_ended_in_the_meantime_is_said_to_have(board: Page, gateway: FakeGateway) -> None:
    board.click(CANCEL)
    board.until_shown("#cancel-dialog")
    gateway.show_requests()
    board.click("#cancel-dialog .danger")
    board.until_reads("#cancel-dialog", "It has ended by itself.")
    assert gateway.cancelled == []


def test_a_request_opens_with_its_timeline_as_a_picture_and_in_words_while_it_is_remembered(board: Page) -> None:
    board.click("#live tbody tr:first-child button.id")
    board.until_shown("#request-dialog .lanes")
    lanes = board.texts("#request-dialog .what")
    assert lanes == ["auth", "body", "reserve", "queue", "prefill", "first token", "decode", "preempted", "resumed"]
    assert len(board.texts("#request-dialog .kind-prefill")) == 5
    words = board.texts("#request-dialog tbody tr")
    assert words[3].split("\t") == ["8.5 ms", "392 ms", "queue", ""]
    assert words[-1].split("\t") == ["2.3 s", "goes on", "decode", "96 tokens so far"]
    assert board.complaints() == []
    board.press("Escape")
    board.until_gone("#request-dialog")
    board.click("#refusals tbody tr:first-child button")
    board.until_reads("#request-dialog", "has no record of it")


@pytest.mark.nightly
def test_an_open_request_is_followed_and_can_be_cancelled_from_there(board: Page, gateway: FakeGateway) -> None:
    row = live(0, "acme") | {"state": "decoding", "output_tokens": 7, "age": 99}
    gateway.show_requests(row)
    board.until_count("#live tbody tr", 1)
    board.click("#live tbody tr:first-child button.id")
    board.until_reads("#request-dialog", "7 of 512 tokens")
    gateway.show_requests(row | {"output_tokens": 8})
    board.until_reads("#request-dialog", "8 of 512 tokens")
    board.click("#request-dialog .danger")
    board.click("#cancel-dialog .danger")
    board.until_reads("#request-dialog", "has no record of it")
    assert gateway.cancelled == [row["id"]]


def test_a_tenant_opens_with_its_limits_what_is_left_of_them_and_its_requests(
    board: Page, gateway: FakeGateway
) -> None:
    gateway.tenant = gateway.tenant | {"recent": []}  # its first request runs
    board.click("#tenants tbody tr:first-child button")
    board.until_shown("#tenant-dialog table")
    rows = [row.split("\t") for row in board.texts("#tenant-dialog h3 + .scroller tbody tr")]
    assert rows[:4] == [
        ["requests/min", "76 %", "212", "600, 900 at once", "38.8 s"],
        ["tokens/day", *["unknown"] * 2, "2,000,000", "unknown"],  # the store does not answer
        ["kv_bytes", "41 %", "151 MiB", "256 MiB", "as requests end"],
        ["queued_requests", "all", "0", "0", "as requests end"],
    ]
    titles = board.texts("#tenant-dialog h3")
    assert titles == ["Limits", "Its requests now", "Its last requests"]
    assert "No recent request." in board.text("#tenant-dialog")
    running = board.texts("#tenant-dialog h3:nth-of-type(2) + .scroller tbody tr")
    assert [row.split("\t")[1] for row in running] == ["decoding", "waiting"]
    board.click("#tenant-dialog h3:nth-of-type(2) + .scroller button")
    board.until_shown("#request-dialog")


@pytest.mark.nightly
def test_a_queued_request_has_its_place_and_two_requests_of_one_id_are_two_rows(
    board: Page, gateway: FakeGateway
) -> None:
    row = live(0, "acme") | {"state": "waiting"}
    ids = {"id": row["id"], "response_id": row["response_id"]}
    namesake = ids | {"response_id": "chatcmpl-of-another"}
    gateway.answers["queue"] = {"waiting": [namesake, ids, ids], "truncated": 0}
    gateway.show_requests(row)
    board.until_reads("#live .state", "waiting, place 2")
    gateway.show_requests(row | {"state": "decoding"})
    board.until("document.querySelector('#live .state').innerText === 'decoding'")
    gateway.show_requests(live(0, "acme") | {"id": "mine"}, live(1, "globex") | {"id": "mine"})
    board.until_count("#live tbody tr", 2)
    assert sorted(board.column("#live", 2)) == ["acme", "globex"]
    board.click("#live [aria-label$='of globex']")
    board.click("#cancel-dialog .danger")
    board.until_count("#live tbody tr", 1)
    assert [row["tenant"] for row in gateway.answers["requests"]["live"]] == ["acme"]


@pytest.mark.nightly
def test_rows_do_not_move_under_the_pointer_and_their_values_do(board: Page, gateway: FakeGateway) -> None:
    before = board.column("#live")
    left, top, _, _ = board.box("#live tbody tr:nth-child(2) td")
    board.move(left + 9, top + 9)
    rows = gateway.answers["requests"]["live"]
    gateway.show_requests(*(row | {"age": 99 - row["age"], "prompt_tokens": 40, "cached_tokens": 16} for row in rows))

    def new_values() -> bool:
        board.move(left + 10, top + 9)
        board.move(left + 9, top + 9)
        return set(board.column("#live", 6)) == {"40, 16 cached"}

    eventually(new_values)
    assert board.column("#live") == before
    board.move(2, 2)
    board.until(f"document.querySelector('#live tbody .id').innerText !== '{before[0]}'")


def test_a_request_is_seen_followed_cancelled_and_remembered(server: ServerProcess, open_tab: PageMaker) -> None:
    heard: list[str] = []

    def listen() -> None:
        with server.stream("/v1/completions", **completion(max_tokens=1900, n=8, ignore_eos=True)) as reply:
            heard.extend(reply.iter_lines())

    client = threading.Thread(target=listen)
    page = open_tab(server.admin_url)
    client.start()
    page.sign_in(server.admin_key)
    page.until_reads("#live", "decoding")
    page.until("[...document.querySelectorAll('.chart > svg .line')].every(line => line.getAttribute('d') !== null)")
    assert "demo" in page.text("#tenants") and "demo" in page.text(".pool-legend")
    page.click("#live button.id")
    page.until_shown("#request-dialog .kind-decode")
    page.click("#request-dialog .danger")
    page.click("#cancel-dialog .danger")
    page.until_reads("#request-dialog", "failed")
    client.join(PATIENCE)
    page.press("Escape")
    page.click("[name=which][value=recent]")
    page.until_reads("#recent", "cancelled")
    page.click("#tenants tbody button")
    page.until_reads("#tenant-dialog", "Its last requests")
    assert page.complaints() == []
    assert any('"code":"cancelled"' in line for line in heard)
