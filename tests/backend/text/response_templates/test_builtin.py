"""The formats that are recognised by what a chat template writes."""

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from backend.text.response_templates.builtin import builtin_source, builtin_template
from tests.backend.text.response_templates.families import deepseek


@pytest.mark.parametrize(
    ("chat_template", "opens"),
    [
        ("{{ '<tool_call>' }}", "<tool_call>"),
        ("{{ '<tool_call>\\n<function=' }}", "<function="),
        ("<|start_header_id|> {{ '\"parameters\": ' }}", "<\\|python_tag"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]"),
        ("[TOOL_CALLS] [ARGS]", "[ARGS\\]"),
        (f"{deepseek('tool call begin')} ```json", "```json"),
        (deepseek("tool call begin"), deepseek("tool sep")),
        ("<|channel|> <|message|>", "commentary"),
    ],
)
def test_a_format_of_calls_is_recognised(chat_template: str, opens: str) -> None:
    source, template = builtin_source(chat_template), builtin_template(chat_template)
    assert source is not None and template is not None
    load_response_template(dict(source))  # transformers reads it too
    field = source["fields"]["tool_calls"]
    assert opens in (field.get("open") or field["open_pattern"])


def test_reasoning_is_recognised_by_itself() -> None:
    template = builtin_template("{{ '<think>\\n' }} <|im_end|>")
    assert template is not None
    assert [field.name for field in template.fields] == ["reasoning_content", "content"]


def test_a_plain_format_needs_no_template() -> None:
    assert builtin_template("<|user|>{{ messages[0].content }}<|assistant|>") is None
