"""Conversations are rendered with all that the template has a place for; the rest is refused by name."""

from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types.shared.reasoning_effort import ReasoningEffort

from backend.errors import InvalidRequest
from backend.text.tokenizer import Tokenizer
from gateway.errors import BadRequest
from gateway.openai.conversation import Conversation, read_conversation
from gateway.openai.messages import template_messages
from tests.backend.tiny_tokenizers import write_model

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}|{% endif %}{% for d in documents or [] %}{{ d.text }}|{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "={{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}{% if enable_thinking %}<think>{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALLS: Any = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
}
OWN_FORM = {"start_anchor": "A:", "fields": {"content": {"close": ";"}}}  # of answers: that of calls is unknown
RESULT = {"role": "tool", "tool_call_id": "a", "content": "2"}


def tokenizer(path: Path, template: str, **config: Any) -> Tokenizer:
    return Tokenizer.from_dir(write_model(path, chat_template=template, **config), 1024)


def conversation(**fields: Any) -> Conversation:
    return read_conversation({"messages": HI, **fields})


def test_a_conversation_with_everything(tmp_path: Path) -> None:
    one = conversation(
        messages=[*HI, CALLS, RESULT],
        tools=[TOOL],
        documents=[{"title": "t", "text": "doc"}],
        chat_template_kwargs={"enable_thinking": True},
    )
    parameters = '{"type": "object", "properties": {}}'
    told = f'[{{"type": "function", "function": {{"name": "f", "description": "", "parameters": {parameters}}}}}]'
    text = one.render(tokenizer(tmp_path, TEMPLATE))
    assert text == f"{told}|doc|user:Hi;assistant:=f([('x', 1)]);tool:2;A:<think>"
    assert one.size > conversation().size + len(told)


@pytest.mark.parametrize("effort", get_args(get_args(ReasoningEffort)[0]))
def test_effort_decides_where_a_template_knows_of_thinking(tmp_path: Path, effort: str) -> None:
    expected = "user:Hi;A:" if effort == "none" else "user:Hi;A:<think>"
    assert conversation(reasoning_effort=effort).render(tokenizer(tmp_path, TEMPLATE)) == expected
    levels = tokenizer(tmp_path, "{{ reasoning_effort }}")
    assert conversation(reasoning_effort=effort).render(levels) == effort


@pytest.mark.parametrize("content", ["One, tw", "  padded", "ends with space "])
def test_the_last_message_is_continued_where_it_ends(tmp_path: Path, content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    one = conversation(messages=messages, continue_final_message=True)
    assert one.render(tokenizer(tmp_path, TEMPLATE)) == f"user:Hi;assistant:{content.lstrip()}"


def test_a_message_whose_end_is_left_out_cannot_be_continued(tmp_path: Path) -> None:
    one = conversation(messages=[*HI, {"role": "assistant", "content": "x"}], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="can therefore not be continued"):
        one.render(tokenizer(tmp_path, "{{ messages[0].content }}"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"messages": [*HI, CALLS]}, "messages[1].tool_calls"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_a_field_without_a_place_in_the_template_is_refused_by_name(tmp_path: Path, fields: Any, param: str) -> None:
    with pytest.raises(BadRequest, match="Leave") as refusal:
        conversation(**fields).render(tokenizer(tmp_path, PLAIN, response_template=OWN_FORM))
    assert refusal.value.param == param


def test_tools_are_told_where_a_template_has_no_place_for_them(tmp_path: Path) -> None:
    told = conversation(messages=[*HI, CALLS, RESULT], tools=[TOOL]).render(tokenizer(tmp_path, PLAIN))
    assert told.startswith("user:You may call functions.") and '{"name": "f", "description": ""' in told
    assert told.endswith(
        'Hi;assistant:<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>;'
        "user:<tool_response>\n2\n</tool_response>;"
    )


@pytest.mark.parametrize("template", [PLAIN, TEMPLATE + "{{ raise_exception('no') }}"])
def test_messages_that_were_made_of_something_else_are_refused_by_its_name(tmp_path: Path, template: str) -> None:
    messages = template_messages([{"role": "user", "content": "Hi"}, CALLS])
    with pytest.raises((BadRequest, InvalidRequest)) as refusal:
        Conversation(messages, prompt_field="input").render(tokenizer(tmp_path, template, response_template=OWN_FORM))
    assert refusal.value.param == "input" and "messages[" not in str(refusal.value)


def test_no_reasoning_needs_no_template_that_reasons(tmp_path: Path) -> None:
    assert conversation(reasoning_effort="none").render(tokenizer(tmp_path, PLAIN)) == "user:Hi;"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs.eos_token"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b"),
        ({"chat_template_kwargs": {"a": "x" * 2**17}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_forbidden_conversation_is_refused_by_its_field(fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        conversation(**fields)
    assert refusal.value.param == param
