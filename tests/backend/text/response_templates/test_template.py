"""A template that is malformed is refused where it stands; the tokens and prompts that matter to one are told."""

from typing import Any

import pytest

from backend.text.response_templates.template import MAX_FIELDS, MAX_LITERALS, ResponseTemplate, ResponseTemplateError
from tests.backend.text.response_templates.families import FAMILIES

CALL = {"type": "function", "function": "{content}"}


def template(**field: Any) -> dict[str, Any]:
    return {"start_anchor": "A:", "fields": {"content": {}, "tool_calls": {"open": "<", "transform": CALL, **field}}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "response_template must be an object"),
        ({**template(), "version": 2}, "response_template.version is 2"),
        ({**template(), "prefix": ""}, "keys that are not known: prefix"),
        ({"start_anchor": "A:"}, f"fields must be an object of 1 to {MAX_FIELDS} fields"),
        ({"fields": {"content": {}}}, "must have start_anchor or start_anchor_pattern"),
        (
            {"start_anchor": "A:", "fields": {"content": {}, "thinking": {}}},
            "only one may lack open .* content, thinking",
        ),
        (template(color="red"), "tool_calls has keys that are not known: color"),
        (template(open_pattern="<"), "tool_calls must have open or open_pattern, not both"),
        (template(close=[]), f"tool_calls.close must be a string, or a list of 1 to {MAX_LITERALS}"),
        (template(close=""), "none of them empty"),
        (template(close_pattern=5), "tool_calls.close_pattern must be a string"),
        (template(close_pattern="(?!a)"), "tool_calls.close_pattern: .* an extension group"),
        (template(content="yaml"), "tool_calls.content is 'yaml'; one of text, int"),
        (template(content="json", content_args={"x": 1}), "tool_calls.content_args: an object is expected"),
        (template(content="json", content_args={"string_delims": [["<"]]}), "string_delims must be at most 16 pairs"),
        (template(content="xml-inline"), "content_args: tag_pattern must be an expression with the named groups"),
        (
            template(content="xml-inline", content_args={"tag_pattern": "(a"}),
            "content_args: tag_pattern: .* not closed",
        ),
        (template(content="kv-lines", content_args={"value_parser": {"name": "x"}}), "value_parser must name one of"),
        (template(join=","), "tool_calls.join must be a string, of a field that repeats"),
        (template(transform_each=1.5), "tool_calls.transform_each must be true or false"),
        (template(transform={"function": {"name": "a"}}), "say with placeholders what a call's name and arguments are"),
        (template(transform={**CALL, "x": ["a {b}"]}), "'a {b}' mixes a placeholder with other text"),
    ],
)
def test_a_malformed_template_is_refused_by_its_place(source: Any, message: str) -> None:
    with pytest.raises(ResponseTemplateError, match=message):
        ResponseTemplate(source)


def test_a_begun_answer_stands_after_the_last_anchor_of_its_prompt() -> None:
    several = ResponseTemplate({**template(), "start_anchor": ["A:", "[/I]"]})
    assert several.begun("A: x [/I] y A: z") == " z"
    assert several.begun("A: x A: y [/I]") == ""
    assert several.begun("nothing") == ""
    pattern = ResponseTemplate({"start_anchor_pattern": r"<a\d*>\n", "fields": {"content": {}}})
    assert pattern.begun("<a1>\nx<a2>\ny") == "y"
    assert pattern.begun("<a1>") == ""


def test_the_special_tokens_that_delimiters_need() -> None:
    harmony = ResponseTemplate(FAMILIES["gpt-oss"].source)
    assert all(harmony.needs(token) for token in ("<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"))
    assert not harmony.needs("<|endoftext|>")
