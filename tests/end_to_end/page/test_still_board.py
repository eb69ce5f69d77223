"""The texts of a busy gateway's untouched board, and the results of its modules: tests that share one tab."""

import re

from tests.end_to_end.page.page_data import NUM_BLOCKS, TENANTS
from tests.end_to_end.page.page_object import Page

MINUS = "\N{MINUS SIGN}"
TITLES = ["Tokens per second", "Requests per second", "Time to first token", "Time between tokens", "Waiting", "Load"]


def test_the_head_says_what_runs_and_how_it_is(still_board: Page) -> None:
    head = still_board.text("header")
    for fact in ("qwen3-0.6b", "0.1.0", "cuda:0 NVIDIA H200", "9f3c2a71", "connected", "3 h 12 min", "Live"):
        assert fact in head
    assert still_board.js("document.title") == "41 running, 17 waiting · qwen3-0.6b · Sluice"
    still_board.until_reads("#problems", "queue time above target")
    unfolded = still_board.js("document.querySelector('#problems > ul').textContent")
    assert "Remedy: raise the weight of the class" in unfolded
    assert still_board.complaints() == []


def test_the_gauges_say_how_full_it_is(still_board: Page) -> None:
    memory, waiting = "KV pool 74 % 378 MiB of 512 MiB", "Waiting 17 sequences, oldest waits 31 s"
    gauges = " ".join(still_board.text("#gauges").split())
    assert gauges == f"Running 41 / 64 sequences {waiting} {memory} Engine busy 93 % of the last 10 s"


def test_percentiles_differ_in_more_than_colour_and_waiting_is_latency(still_board: Page) -> None:
    names = [name.split()[-1] for name in still_board.attributes(".chart:nth-child(3) > svg .line", "class")]
    assert names == ["line-p50", "line-p99", "line-waits"]
    lines = "[...document.querySelectorAll('.chart:nth-child(3) > svg .line')]"
    assert len(set(still_board.js(f"{lines}.map(line => getComputedStyle(line).strokeDasharray)"))) == 3
    band = still_board.attributes(".chart:nth-child(3) .band", "d")[0]
    assert band.count("z") == 289  # seconds in which both are known
    assert "oldest waits" in still_board.texts(".chart:nth-child(3) .legend")[0]


def test_every_chart_has_axes_with_units_and_says_in_words_what_it_shows(still_board: Page) -> None:
    labels = still_board.attributes(".chart > svg", "aria-label")
    assert [label.split(",")[0] for label in labels] == TITLES
    assert all(re.search(r"last five minutes\. .*: \S.* last, from .+ to .+\.$", label) for label in labels)
    assert "refused: 0 last, from 0 to 1" in labels[1]
    assert re.search(r"p50: 1\d\d ms last", labels[2])
    axes = still_board.texts(".chart > svg text")
    assert {f"{MINUS}5 min", "now", "2 s", "80 ms", "100 %", "6,000"} <= set(axes)


def test_tenants_stand_by_their_share_with_what_they_use(still_board: Page) -> None:
    assert still_board.column("#tenants") == list(TENANTS)
    assert still_board.column("#tenants", 2)[:3] == ["34 %", "17 %", "11 %"]
    assert still_board.column("#tenants", 5)[0] == "105 MiB"
    assert still_board.column("#tenants", 6)[2].startswith(MINUS)  # in debt


def test_the_pool_shows_each_holder_in_a_colour_and_a_pattern_of_its_own(still_board: Page) -> None:
    fills = still_board.attributes(".pool .held", "fill")
    assert len(set(fills)) == len(fills) == 9  # eight tenants and the others
    assert len(set(still_board.attributes(".patterns path", "d")[:8])) == 8
    assert "".join(still_board.attributes(".pool path", "d")).count("z") == NUM_BLOCKS
    legend = still_board.texts(".pool-legend li")
    assert legend[0].split() == ["acme", "135", "MiB", "26", "%"]
    assert legend[-1].startswith("free")
    assert still_board.attributes(".pool", "aria-label")[0].startswith("KV pool: acme 26 %")
    assert still_board.text("#pool-scale") == "2,048 blocks of 16 tokens, 256 KiB; a square is a block."


def test_refusals_name_tenant_status_reason_and_message(still_board: Page) -> None:
    assert still_board.column("#refusals", 2)[:2] == ["acme", "globex"]
    assert still_board.column("#refusals", 3)[:2] == ["429", "503"]
    assert still_board.column("#refusals", 4)[:2] == ["requests-per-minute", "infeasible_deadline"]
    assert still_board.column("#refusals", 5)[1] == "The first token would come 4.1 s after the deadline."


def test_each_failure_doubles_the_wait_up_to_a_quarter_of_a_minute(still_board: Page) -> None:
    waits = still_board.js(
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


def test_bars_lie_where_their_times_are(still_board: Page) -> None:
    places = still_board.js(
        """(async () => {
          const { timeline } = await import("/timeline.js");
          const entries = [[0, 1, "queue"], [1, 3, "prefill"], [3, null, "first token"], [3, null, "decode"]];
          const shown = timeline(entries.map(([at, until, what]) => ({ at, until, what, detail: "" })), 4);
          return [...shown.querySelectorAll(".track > span")].map(({ style }) => [style.left, style.width]);
        })()"""
    )
    assert places == [["0%", "calc(25% - 1px)"], ["25%", "calc(50% - 1px)"], ["75%", ""], ["75%", "calc(25% - 1px)"]]


def test_an_open_phase_ends_with_its_request(still_board: Page) -> None:
    words = still_board.js(
        """(async () => {
          const { timeline } = await import("/timeline.js");
          const entries = [[0, null, "reserve"], [2, null, "end"]];
          const shown = timeline(entries.map(([at, until, what]) => ({ at, until, what, detail: "" })), 2);
          return shown.querySelector("tbody tr").innerText;
        })()"""
    )
    assert words == "0 s2 sreserve"
