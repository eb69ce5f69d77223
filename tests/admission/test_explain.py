import json
from typing import Any

import pytest

from admission.core import CoreConfig
from admission.event_logs.event_log import VERSION, LogError
from admission.explain import explain
from tests.admission.staged_core import StagedCore
from tests.backend.sequences import TOKEN

KEPT = [[], None, None, [1, 2], None]  # how an arrival ends: blocks, the next turn, its group, features, grammar
HEADER: list[Any] = ["log", VERSION, {}, {"overload": "deadline"}, [], 512]
LOG = [
    HEADER,
    ["arrive", 1.0, "r-0", "acme", 15, 100, 100, 1, None, 0, None, None, None, 0.5, 2.25, None, *KEPT],
    ["plan", 1.5, 0, 3, 0, [], [], ["slots", "other-0"], None, []],
    ["done", 2.0, 0, 0.1, ["other-9"], []],
    ["plan", 2.5, 1, 3, 0, [], [], ["memory", "r-0"], None, []],
    ["plan", 3.0, 2, 3, 0, [["r-0", 10]], [], None, None, []],
    ["plan", 3.1, 3, 3, 0, [["r-0", 5]], [], None, None, []],
    ["plan", 4.0, 4, 3, 0, [], ["r-0"], ["release", "r-0"], None, []],
    ["plan", 4.5, 5, 3, 0, [["r-0", 25]], [], None, None, []],
    ["arrive", 4.6, "x-0", "acme", 5, 10, 10, 0, None, 0, None, None, None, None, None, "QueueFull", *KEPT],
    ["done", 5.0, 5, 0.1, ["r-0"], []],
    ["finish", 5.1, "r-0", "cancelled"],
]
LINES = [json.dumps(entry) for entry in LOG]


def test_the_story_says_when_why_and_how_long_a_request_waited() -> None:
    assert explain(LINES, "r") == [
        "r-0",
        "    0.000 s  arrived: tenant acme, class 1, 15 prompt tokens, max_tokens 100",
        "    0.000 s  first token expected within 0.500 s, the last within 2.250 s",
        "    2.000 s  admitted after waiting 2.000 s",
        "             1.000 s: behind others, because max_num_seqs sequences were running",
        "             0.500 s: until the next step was planned",
        "             0.500 s: KV memory, or what those running may still need of it, had no room",
        "    2.000 s  prefill of 10 tokens in step 2",
        "    2.100 s  prefill of 5 tokens in step 3",
        "    3.000 s  preempted: its memory was needed; it will be computed again",
        "    3.500 s  admitted after waiting 0.500 s",
        "             0.500 s: memory of preempted sequences was on its way back",
        "    3.500 s  prefill of 25 tokens in step 5",
        "    4.000 s  ended by an end token",
    ]


def test_a_tenant_that_is_passed_over_is_told_for_which_limit_of_its_own() -> None:
    log = [
        HEADER,
        ["arrive", 1.0, "r-0", "acme", 15, 100, 100, 1, None, 0, None, None, None, 0.5, 2.25, None, *KEPT],
        ["plan", 1.0, 0, 3, 0, [], [], None, {"acme": "allowance"}, []],
        ["plan", 1.5, 1, 3, 0, [], [], None, None, []],
        ["plan", 2.0, 2, 3, 0, [], [], ["slots", "other-0"], {}, []],
        ["plan", 2.25, 3, 3, 0, [["r-0", 15]], [], None, None, []],
    ]
    assert explain(map(json.dumps, log), "r")[4:6] == [
        "             1.000 s: its tenant held as much KV memory as its limit allows",
        "             0.250 s: behind others, because max_num_seqs sequences were running",
    ]


def test_a_wait_for_shorter_requests_of_its_tenant_is_told_with_their_number() -> None:
    def arrival(now: float, name: str, tenant: str, prompt: int) -> list[Any]:
        return ["arrive", now, name, tenant, prompt, 100, 100, 1, None, 0, *[None] * 6, *KEPT]

    log = [
        [*HEADER[:3], {"overload": "deadline", "overtaking_seconds": 22.0}, *HEADER[4:]],
        arrival(1.0, "r-0", "acme", 400),
        arrival(1.2, "a-0", "acme", 20),
        arrival(1.3, "b-0", "acme", 30),
        arrival(1.3, "c-0", "other", 30),
        ["plan", 1.5, 0, 3, 0, [["a-0", 20]], [], ["slots", "b-0"], None, []],
        ["plan", 2.0, 1, 3, 0, [["b-0", 30]], [], ["slots", "c-0"], None, []],
        ["plan", 2.25, 2, 3, 0, [["c-0", 30]], [], ["slots", "r-0"], None, []],
        ["plan", 3.25, 3, 3, 0, [["r-0", 400]], [], None, None, []],
    ]
    assert explain(map(json.dumps, log), "r")[2:6] == [
        "    2.250 s  admitted after waiting 2.250 s",
        "             1.000 s: max_num_seqs sequences were running",
        "             0.750 s: for 2 shorter requests of its tenant",
        "             0.500 s: until the next step was planned",
    ]


def test_a_step_without_memory_is_told_by_whoever_gave_way_for_it() -> None:
    log = [*LOG[:7], ["lost", 3.5, 3, ["r-0"]], ["plan", 4.0, 3, 0, 0, [["r-0", 15]], [], None, None, []]]
    assert explain(map(json.dumps, log), "r")[-5:-1] == [
        "    2.500 s  preempted: the device had no memory for step 3; it will be computed again",
        "    3.000 s  admitted after waiting 0.500 s",
        "             0.500 s: until the next step was planned",
        "    3.000 s  prefill of 15 tokens in step 3",
    ]


def test_a_refusal_is_told() -> None:
    assert explain(LINES, "x-0")[-1] == "    0.000 s  refused: QueueFull"


def test_a_refusal_by_a_limit_is_told() -> None:
    asked = ["request", 2.0, "r", "acme", "k1", None, 80, None, None, None, [[15, 100, True], [5, 100, True]]]
    assert explain(map(json.dumps, [HEADER, [*asked, "tokens/min"]]), "r") == [
        "r",
        "    0.000 s  asked: tenant acme, 20 prompt tokens, max_tokens 200 in all",
        "    0.000 s  refused before it came to the queue: tokens/min",
    ]
    assert explain([*map(json.dumps, [HEADER, [*asked, None]]), *LINES[1:]], "r") == explain(LINES, "r")


def test_a_request_that_the_log_does_not_know_has_no_story() -> None:
    assert explain(LINES, "nobody") == []


def test_a_wait_that_ends_otherwise_than_with_a_slot_is_told_too() -> None:
    log = [*LOG[:5], ["finish", 3.25, "r-0", "cancelled"]]
    assert explain(map(json.dumps, log), "r")[3:] == [
        "    2.250 s  left the queue after waiting 2.250 s",
        "             1.000 s: behind others, because max_num_seqs sequences were running",
        "             0.750 s: KV memory, or what those running may still need of it, had no room",
        "             0.500 s: until the next step was planned",
        "    2.250 s  cancelled: its client left, or an operator or the gateway ended it",
    ]


def test_whoever_has_not_ended_when_the_log_does_is_told_so() -> None:
    assert explain(LINES[:5], "r")[3] == "    1.500 s  still waiting when the log ended, for 1.500 s"
    assert explain(LINES[:6], "r")[-1] == "    2.000 s  had not ended when the log did"


@pytest.mark.parametrize(
    ("overload", "reason", "told"),
    [
        ("deadline", "expired", "given up: its deadline had passed, or could not be met any more"),
        ("controlled_delay", "expired", "given up: the queue had stood for too long"),
        ("deadline", "preempted", "ended: it lost its memory as often as it may, and nobody else could give any"),
    ],
)
def test_whoever_was_given_up_is_told_why(overload: str, reason: str, told: str) -> None:
    header = [*HEADER[:3], {"overload": overload}, *HEADER[4:]]
    log = [header, LOG[1], ["plan", 1.5, 0, 3, 0, [], [], None, None, [["r-0", reason]]]]
    assert explain(map(json.dumps, log), "r")[3:] == [
        "    0.500 s  left the queue after waiting 0.500 s",
        "             0.500 s: until the next step was planned",
        f"    0.500 s  {told}",
    ]


def test_an_answer_that_has_all_its_tokens_has_ended() -> None:
    log = [*LOG[:7], ["done", 3.5, 3, 0.1, [], ["r-0"]]]
    assert explain(map(json.dumps, log), "r")[-1] == "    2.500 s  ended: it has as many tokens as it may"


def test_deadlines_are_told() -> None:
    arrival = [*LOG[1][:10], 3.0, 11.0, *LOG[1][12:]]
    assert explain(map(json.dumps, [HEADER, arrival]), "r")[2:4] == [
        "    0.000 s  its first token is of no use after 2.000 s",
        "    0.000 s  its last token is of no use after 10.000 s",
    ]


@pytest.mark.parametrize("request_id", ["", "x", "cmpl", "cmpl-12", "cmpl-12-ab-", "0"])
def test_the_beginning_of_an_id_is_no_id(request_id: str) -> None:
    arrival = ["arrive", 1.0, "cmpl-12-ab-0", *LOG[1][3:]]
    lines = list(map(json.dumps, [HEADER, arrival]))
    assert explain(lines, request_id) == []
    assert explain(lines, "cmpl-12-ab")[0] == explain(lines, "cmpl-12-ab-0")[0] == "cmpl-12-ab-0"


@pytest.mark.parametrize("line", ["garbage", "7", "[]", '["arrive",1.0,"r-1"]', '["plan"]'])
def test_a_line_that_is_no_entry_is_named(line: str) -> None:
    with pytest.raises(LogError, match="line 3: not an entry"):
        explain([*LINES[:2], line], "r")


def test_a_log_of_another_version_is_not_guessed_at() -> None:
    with pytest.raises(LogError, match="a log of version 3"):
        explain(['["log",3]'], "r")


def test_what_was_cached_and_what_was_given_up_is_told() -> None:
    stage = StagedCore(CoreConfig(), num_blocks=12, max_model_len=48)
    stage.arrive("first", [7] * 9, 4)
    stage.drain()
    stage.arrive("second", [7] * 9 + [TOKEN] * 4 + [8] * 5, 2)
    stage.drain()
    stage.arrive("large", [9] * 40, 4, tenant="b")
    lines = stage.run()
    story = explain(lines, "second")
    assert "    0.000 s  of its 18 prompt tokens 12 were cached, and are not computed" in story
    assert "    0.000 s  prefill of 6 tokens in step 4" in story
    assert not any("cached" in line for line in explain(lines, "first"))
    (given_up,) = (line for line in explain(lines, "large") if "given up" in line)
    assert given_up.endswith("; 2 cached blocks were given up for memory, 2 that nobody holds are left")


def test_the_grammar_of_an_answer_is_named_and_what_it_forced_is_counted() -> None:
    log = [
        HEADER,
        ["arrive", 1.0, "r-0", "acme", 15, 100, 100, 1, None, 0, *[None] * 6, *KEPT[:-1], "81f3a0c2d4e5b697"],
        ["plan", 1.5, 0, 0, 0, [["r-0", 15]], [], None, None, []],
        ["done", 2.0, 0, 0.5, [], [], [], [["r-0", 7]]],
        ["plan", 2.0, 1, 0, 0, [], [], None, None, []],
        ["done", 2.5, 1, 0.5, ["r-0"], [], []],
    ]
    told = explain(map(json.dumps, log), "r")
    assert told[2] == "    0.000 s  its answer has to match the grammar 81f3a0c2d4e5b697"
    assert "    1.000 s  7 tokens that its grammar forced came with another" in told
