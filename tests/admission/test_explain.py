import json
from typing import Any

import pytest

from admission.core import CoreConfig
from admission.event_logs.event_log import VERSION, LogError
from admission.explain import explain
from backend.scheduler.sequence import SequenceStatus
from tests.admission.staged_core import StagedCore
from tests.backend.sequences import TOKEN

KEPT: list[Any] = [[], None, None, None]  # how an arrival ends: blocks, the next turn, its group, its grammar


def arrival(
    now: float, name: str, tenant: str, prompt: int, first_by: float | None = None, level: int = 1
) -> list[Any]:
    return ["arrive", now, name, tenant, prompt, 100, 100, 1, None, 0, first_by, *[None] * 5, *KEPT]


HEADER: list[Any] = ["log", VERSION, {}, {"overload": "deadline"}, [], 0, 512]
LOG = [
    HEADER,
    arrival(0.5, "other-0", "globex", 10),
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
        "             1.000 s: 1 request of globex was due earlier; max_num_seqs sequences were running",
        "             0.500 s: until the next step was planned",
        "             0.500 s: KV memory, or what those running may still need of it, had no room",
        "    2.000 s  prefill of 10 tokens in step 2",
        "    2.100 s  prefill of 5 tokens in step 3",
        "    3.000 s  preempted: its slot or memory was needed; what is not cached of it is computed again",
        "    3.500 s  admitted after waiting 0.500 s",
        "             0.500 s: memory of preempted sequences was on its way back",
        "    3.500 s  prefill of 25 tokens in step 5",
        "    4.000 s  ended by an end token",
    ]


def test_a_tenant_that_is_passed_over_is_told_for_which_limit_of_its_own() -> None:
    log = [
        HEADER,
        arrival(0.5, "other-0", "globex", 10),
        ["arrive", 1.0, "r-0", "acme", 15, 100, 100, 1, None, 0, None, None, None, 0.5, 2.25, None, *KEPT],
        ["plan", 1.0, 0, 3, 0, [], [], None, {"acme": "allowance"}, []],
        ["plan", 1.5, 1, 3, 0, [], [], None, None, []],
        ["plan", 2.0, 2, 3, 0, [], [], ["slots", "other-0"], {}, []],
        ["plan", 2.25, 3, 3, 0, [["r-0", 15]], [], None, None, []],
    ]
    assert explain(map(json.dumps, log), "r")[4:6] == [
        "             1.000 s: its tenant held as much KV memory as its limit allows",
        "             0.250 s: 1 request of globex was due earlier; max_num_seqs sequences were running",
    ]


def waits_of(*entries: list[Any], name: str = "r") -> list[str]:
    """What is told of the wait until it is admitted."""
    story = explain(map(json.dumps, [HEADER, *entries]), name)
    begins = next(n for n, line in enumerate(story) if "admitted after" in line)
    return [line.strip() for line in story[begins + 1 :] if line.startswith(" " * 13)]


def plan(now: float, *began: str, why: tuple[Any, ...] | None = None) -> list[Any]:
    return ["plan", now, 0, 3, 0, [[name, 20] for name in began], [], why, None, []]


def test_a_wait_is_told_by_whose_requests_were_due_earlier_and_what_they_waited_for() -> None:
    assert waits_of(
        arrival(1.0, "r-0", "acme", 400),
        arrival(1.2, "a-0", "globex", 20),
        arrival(1.3, "b-0", "globex", 30),
        arrival(1.3, "c-0", "initech", 30),
        plan(1.5, "a-0", why=("slots", "b-0")),
        plan(2.0, "b-0", why=("slots", "c-0")),
        plan(2.25, "c-0", why=("slots", "r-0")),
        plan(2.5, why=("slots", "r-0")),
        plan(3.25, "r-0"),
    ) == [
        "1.000 s: 2 requests of globex, 1 of initech were due earlier; max_num_seqs sequences were running",
        "0.750 s: max_num_seqs sequences were running",
        "0.500 s: until the next step was planned",
    ]


def test_of_several_models_a_wait_that_nothing_else_explains_is_for_a_step_of_its_own() -> None:
    header = [*HEADER[:4], [HEADER[4:]], *HEADER[4:]]
    log = [header, arrival(1.0, "r-0", "acme", 400), plan(1.0), plan(1.5, "r-0")]
    assert "             0.500 s: until the next step of its model was planned" in explain(map(json.dumps, log), "r")


def test_a_request_overtaken_for_a_slot_is_told_who_was_served_first_be_it_due_later() -> None:
    assert waits_of(
        arrival(1.0, "r-0", "acme", 400),
        arrival(1.2, "a-0", "globex", 20),
        plan(1.25, why=("slots", "a-0", 1)),
        plan(1.5, "a-0", why=("slots", "r-0")),
        arrival(2.0, "b-0", "initech", 20),
        plan(2.25, "b-0", why=("slots", "r-0")),
        plan(2.5, "r-0"),
    ) == [
        "1.000 s: 1 request of globex was served first; max_num_seqs sequences were running",
        "0.250 s: until the next step was planned",
        "0.250 s: 1 request of initech was due earlier; max_num_seqs sequences were running",
    ]


def test_a_wait_in_which_others_began_and_nobody_was_kept_is_for_those_alone() -> None:
    assert waits_of(
        arrival(1.0, "r-0", "acme", 400), arrival(1.0, "a-0", "globex", 20), plan(1.0, "a-0"), plan(1.5, "r-0")
    ) == ["0.500 s: 1 request of globex was due earlier"]


def test_only_the_tenants_with_most_requests_before_it_are_named() -> None:
    others = [(f"t{n}", f"x{n}{k}") for n in range(6) for k in range(6 - n)]
    assert (
        waits_of(
            arrival(1.0, "r-0", "acme", 400),
            *[arrival(1.0, f"{name}-0", tenant, 20) for tenant, name in others],
            plan(1.0, *[f"{name}-0" for _, name in others]),
            plan(1.5, "r-0"),
        )[0]
        == "0.500 s: 6 requests of t0, 5 of t1, 4 of t2, 6 of 3 more tenants were due earlier"
    )


def test_requests_of_its_own_tenant_that_went_first_are_told_apart_by_whether_deadlines_decided() -> None:
    dated = arrival(1.0, "d-0", "acme", 90, first_by=2.0)
    shorter, sibling = arrival(1.1, "s-0", "acme", 20), arrival(1.0, "r-1", "acme", 400)
    assert waits_of(
        arrival(1.0, "r-0", "acme", 400), sibling, dated, shorter, plan(1.0, "d-0", "s-0", "r-1"), plan(1.5, "r-0"),
        name="r-0",
    )[0] == (
        "0.500 s: 1 request of its own tenant was due earlier; 1 request of its own tenant went first: older, "
        "shorter, or still in time; other answers to its request went first"
    )  # fmt: skip


def test_requests_that_had_begun_or_share_its_prompt_are_not_before_it() -> None:
    forked = [*plan(1.0), {"forked": {"f-0": "a-0"}}]
    again = plan(1.5, "f-0", why=("memory", "r-0"))
    assert waits_of(
        arrival(1.0, "r-0", "acme", 40), arrival(1.0, "f-0", "globex", 20), forked, again, plan(2.0, "r-0")
    ) == [
        "0.500 s: until the next step was planned",
        "0.500 s: KV memory, or what those running may still need of it, had no room",
    ]


def test_a_real_wait_names_the_tenant_that_was_served_first() -> None:
    stage = StagedCore(CoreConfig(), max_num_seqs=1)
    for n in range(2):
        stage.arrive(f"first-{n}", 8, 4, tenant="globex", first_token_by=stage.now + 3)
    stage.arrive("second", 8, 4, tenant="acme", first_token_by=stage.now + 6)
    (told,) = [line for line in explain(stage.run(), "second") if "due earlier" in line]
    assert "1 request of globex was due earlier; max_num_seqs sequences were running" in told


def test_a_step_without_memory_is_told_by_its_victims() -> None:
    log = [*LOG[:8], ["lost", 3.5, 3, ["r-0"]], ["plan", 4.0, 3, 0, 0, [["r-0", 15]], [], None, None, []]]
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
    log = [*LOG[:6], ["finish", 3.25, "r-0", "cancelled"]]
    assert explain(map(json.dumps, log), "r")[3:] == [
        "    2.250 s  left the queue after waiting 2.250 s",
        "             1.000 s: 1 request of globex was due earlier; max_num_seqs sequences were running",
        "             0.750 s: KV memory, or what those running may still need of it, had no room",
        "             0.500 s: until the next step was planned",
        "    2.250 s  cancelled: its client left, or an operator or the gateway ended it",
    ]


def test_a_request_that_has_not_ended_when_the_log_does_is_told_so() -> None:
    assert explain(LINES[:6], "r")[3] == "    1.500 s  still waiting when the log ended, for 1.500 s"
    assert explain(LINES[:7], "r")[-1] == "    2.000 s  had not ended when the log did"


@pytest.mark.parametrize(
    ("overload", "reason", "told"),
    [
        ("deadline", "expired", "given up: its deadline had passed, or could not be met any more"),
        ("controlled_delay", "expired", "given up: the queue had stood for too long"),
        ("deadline", "preempted", "ended: it lost its memory as often as it may, and no other sequence could give any"),
    ],
)
def test_a_request_that_was_given_up_is_told_why(overload: str, reason: str, told: str) -> None:
    header = [*HEADER[:3], {"overload": overload}, *HEADER[4:]]
    log = [header, LOG[2], ["plan", 1.5, 0, 3, 0, [], [], None, None, [["r-0", reason]]]]
    assert explain(map(json.dumps, log), "r")[3:] == [
        "    0.500 s  left the queue after waiting 0.500 s",
        "             0.500 s: until the next step was planned",
        f"    0.500 s  {told}",
    ]


def test_an_answer_that_has_all_its_tokens_has_ended() -> None:
    log = [*LOG[:8], ["done", 3.5, 3, 0.1, [], ["r-0"]]]
    assert explain(map(json.dumps, log), "r")[-1] == "    2.500 s  ended: it has as many tokens as it may"


def test_deadlines_are_told() -> None:
    dated = [*LOG[2][:10], 3.0, 11.0, *LOG[2][12:]]
    assert explain(map(json.dumps, [HEADER, dated]), "r")[2:4] == [
        "    0.000 s  its first token is of no use after 2.000 s",
        "    0.000 s  its last token is of no use after 10.000 s",
    ]
    for first_by, told in (
        (1.002, "after 0.002 s"),
        (1.0004, "after 0.000400 s"),
        (1.0, "any more"),
        (0.5, "any more"),
    ):
        dated[10] = first_by
        assert explain(map(json.dumps, [HEADER, dated]), "r")[2] == f"    0.000 s  its first token is of no use {told}"


@pytest.mark.parametrize("request_id", ["", "x", "cmpl", "cmpl-12", "cmpl-12-ab-", "0"])
def test_the_beginning_of_an_id_is_no_id(request_id: str) -> None:
    asked = ["arrive", 1.0, "cmpl-12-ab-0", *LOG[2][3:]]
    lines = list(map(json.dumps, [HEADER, asked]))
    assert explain(lines, request_id) == []
    assert explain(lines, "cmpl-12-ab")[0] == explain(lines, "cmpl-12-ab-0")[0] == "cmpl-12-ab-0"


@pytest.mark.parametrize("line", ["garbage", "7", "[]", '["arrive",1.0,"r-1"]', '["plan"]'])
def test_a_line_that_is_no_entry_is_named(line: str) -> None:
    with pytest.raises(LogError, match="line 3: not an entry"):
        explain([*LINES[:2], line], "r")


def test_a_log_of_another_version_is_not_guessed_at() -> None:
    with pytest.raises(LogError, match="a log of version 3"):
        explain(['["log",3]'], "r")


def test_an_explanation_tells_cache_hits_and_evictions() -> None:
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
    assert given_up.endswith("; 2 cached blocks were given up for memory, 2 idle ones are left")


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


def test_a_tenant_above_its_share_of_slots_is_told_who_took_one() -> None:
    stage = StagedCore(CoreConfig())
    for n in range(4):
        stage.arrive(f"runs-{n}", 8, 50)
    stage.step()
    waits = stage.arrive("waits", 8, 8, first_token_by=stage.now + 5.0)
    stage.step()
    taker = stage.arrive("takes", 8, 8, tenant="b", first_token_by=stage.now + 9.0)
    while taker.status is not SequenceStatus.RUNNING:
        stage.step()
    assert waits.status is SequenceStatus.WAITING
    stage.run()
    waited = [line for line in explain(stage.lines, "waits") if "of b" in line]
    assert len(waited) == 1 and waited[0].endswith(
        "1 request of b was served first; max_num_seqs sequences were running"
    )


def test_a_row_with_a_draft_is_no_prefill() -> None:
    drafted = ["plan", 2.0, 1, 3, 0, [["r", 4]], [], None, None, [], {"drafted": {"r": 3}}]
    log = [HEADER, arrival(0.0, "r", "t", 20), plan(1.0, "r"), drafted]
    told = [line for line in explain(map(json.dumps, log), "r") if "prefill of" in line]
    assert told == ["    1.000 s  prefill of 20 tokens in step 0"]
