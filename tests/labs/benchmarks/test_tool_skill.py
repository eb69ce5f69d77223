from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.benchmarks.tool_skill.asks import Ask, draw_family
from labs.benchmarks.tool_skill.names import UNSEEN_PEOPLE, UNSEEN_PLACES
from labs.benchmarks.tool_skill.tools import Parameter, Tool
from labs.benchmarks.tool_skill.turns import TOOL_SKILLS, ToolBox, fresh_tool_turns, is_held_out
from labs.benchmarks.words import UNSEEN_WORDS

seeds = st.integers(0, 2**32)
boxes = st.builds(lambda seed: ToolBox(Random(seed)), seeds)
skills = st.sampled_from([skill for skill in TOOL_SKILLS if skill != "tool_unseen"])


@given(seeds, st.booleans())
def test_a_call_names_its_tool_and_parameters_in_their_order_with_values_of_their_types(
    seed: int, unseen: bool
) -> None:
    rng = Random(seed)
    family = draw_family(rng, "city", unseen=unseen)
    kinds = {parameter.name: parameter.kind for parameter in family.tool.parameters}
    for call in family.draw(rng).calls:
        assert call.name == family.tool.name
        assert {parameter.name for parameter in family.tool.parameters if parameter.is_required} <= set(call.arguments)
        assert list(call.arguments) == [name for name in kinds if name in call.arguments]
        for name, value in call.arguments.items():
            match kinds[name]:
                case "integer" | "number":
                    assert type(value) is int
                case "boolean":
                    assert type(value) is bool
                case "string":
                    assert type(value) is str
                case choices:
                    assert value in choices


@given(boxes, skills)
def test_tools_have_names_of_their_own_and_the_right_ones_are_called(box: ToolBox, skill: str) -> None:
    names = [tool.name for tool in box.tools]
    assert 0 < len(names) == len(set(names))
    turn = box.turn(held_out=False, skill=skill)
    if turn is None:
        return
    assert {call.name for call in turn.calls} <= set(names)
    assert len(turn.results) == len(turn.calls)
    assert {"tool_none": not turn.calls, "tool_parallel": len(turn.calls) in {2, 3}}.get(skill, len(turn.calls) == 1)


@given(boxes)
def test_training_never_calls_with_held_out_arguments(box: ToolBox) -> None:
    turn = box.turn(held_out=False)
    assert turn is None or not is_held_out(Ask(turn.prompt, turn.calls, ()))


@pytest.mark.parametrize("skill", TOOL_SKILLS)
def test_fresh_turns_depend_on_nothing_but_their_seed(skill: str) -> None:
    fresh = fresh_tool_turns(30, 5, skill)
    assert fresh == fresh_tool_turns(30, 5, skill) != fresh_tool_turns(30, 6, skill)
    calls = [call for _, turn in fresh for call in turn.calls]
    assert bool(calls) == (skill != "tool_none")
    assert all(is_held_out(Ask(turn.prompt, turn.calls, ())) for _, turn in fresh if turn.calls)


def test_unseen_names_are_in_no_training_turn() -> None:
    rng = Random(1)
    boxes = (ToolBox(rng) for _ in range(300))
    text = " ".join(f"{turn.prompt} {turn.first_text}" for box in boxes if (turn := box.turn(held_out=False)))
    words = set(text.replace('"', " ").replace("_", " ").split())
    assert not words & {*UNSEEN_WORDS, *UNSEEN_PLACES, *UNSEEN_PEOPLE}


def test_a_tool_is_one_line_and_a_schema_for_clients() -> None:
    tool = Tool(
        "get_weather", (Parameter("city", "string"), Parameter("unit", ("c", "f"), is_required=False)), "weather"
    )
    assert tool.line() == '{"name": "get_weather", "parameters": {"city": "string", "unit": ["c", "f"]}}'
    assert tool.schema() == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}},
                "required": ["city"],
            },
        },
    }
