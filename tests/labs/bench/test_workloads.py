from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.bench.workloads import SCHEMA, WORKLOADS, Prose, Sessions, Workload
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content


def sessions(workload: Workload | str, context: int = 4096) -> Sessions:
    named = WORKLOADS[workload] if isinstance(workload, str) else workload
    return Sessions(named, Prose(Random(1), tokens_per_word=1.0), Random(2), context, {"model": "m"})


def prompts(made: Sessions, count: int) -> list[str]:
    return [next(made.next()).body["messages"][-1]["content"] for _ in range(count)]


@given(st.integers(1, 3000), st.floats(0.5, 4))
def test_a_prompt_has_the_wanted_number_of_tokens(tokens: int, per_word: float) -> None:
    text = Prose(Random(1), per_word).fresh(tokens)
    assert abs((len(text.split()) - 1) * per_word - tokens) <= max(per_word, 1)


def test_no_two_prompts_begin_alike() -> None:
    made = prompts(sessions("reasoning"), 2000)
    assert len({text[:9] for text in made}) == 2000


def test_an_agents_prompt_begins_with_its_last_one_and_waits_for_its_tool() -> None:
    session = sessions("agent").next()
    turn = next(session)
    before = turn.body["messages"]
    for answer in ("first", "second"):
        turn = session.send(answer)
        messages = turn.body["messages"]
        assert messages[: len(before)] == before and messages[len(before)]["content"] == answer
        assert turn.wait > 0
        before = messages


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("context", [256, 2048, 100_000])
def test_prompts_and_answers_fit_the_context(name: str, context: int) -> None:
    made = sessions(name, context)
    if made.workload.kind == "skills":
        return
    for _ in range(50):
        turn = next(made.next())
        texts = turn.body.get("input") or [message["content"] for message in turn.body["messages"]]
        assert sum(len(text.split()) for text in texts) <= context


def test_prompts_of_a_trace_share_what_its_hashes_say() -> None:
    made = sessions("chat")
    contents = [Content((1, 2), 100, 250), Content((1, 2, 9), 100, 350), Content((1, 5), 100, 250)]
    texts = [
        next(made.of_trace(Arrival(0.0, content.length or 0, 8, content=content))).body["messages"][0]["content"]
        for content in contents
    ]
    words = [text.split() for text in texts]
    assert words[0][:200] == words[1][:200] and words[0][200:] != words[1][200:250]
    assert words[0][:100] == words[2][:100] and words[0][100:200] != words[2][100:200]
    assert made.num_cut == 0
    next(made.of_trace(Arrival(0.0, 9000, 8)))
    assert made.num_cut == 1


def test_answers_by_a_schema_are_judged() -> None:
    turn = next(sessions("extract").next())
    assert turn.body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert turn.check is not None
    assert turn.check('{"kind": "order", "urgent": true, "items": [1]}', "stop")
    assert not turn.check('{"kind": "order", "urgent": true, "items": [100]}', "stop")
    assert not turn.check('{"kind": "ord', "length")
