"""The page says how old its answers are, and asks again by itself."""

import re

from tests.gateway.admin.page.fake_gateway import FakeGateway
from tests.gateway.admin.page.page_object import Page

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


def test_each_failure_doubles_the_wait_up_to_a_quarter_of_a_minute(board: Page) -> None:
    waits = board.js(
        """(async () => {
          const { Poller } = await import("/poller.js");
          const waits = [];
          const poller = new Poller(async () => { throw new Error("gone") }, (error, wait) => waits.push(wait));
          poller.running = true;
          for (let time = 0; time < 6; time++) await poller.now();
          poller.stop();
          return waits;
        })()"""
    )
    assert waits == [1000, 2000, 4000, 8000, 15000, 15000]


def test_it_asks_again_by_itself(board: Page, gateway: FakeGateway) -> None:
    gateway.answers["overview"] |= {"model": "another"}
    board.until_reads("#model", "another")


def test_a_page_that_is_paused_stands_still_until_it_is_told_to_go_on(board: Page, gateway: FakeGateway) -> None:
    board.click("#pause")
    assert board.js(STATE) == "paused"
    assert board.text("#freshness").startswith("Paused since ")
    gateway.answers["overview"] |= {"model": "another"}
    assert board.text("#model") == "qwen3-0.6b"
    board.click("#pause")
    board.until_reads("#model", "another")
    assert board.js(STATE) == "live"
