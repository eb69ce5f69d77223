"""All content of a request is text: control tokens are in a prompt only where the template puts them."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.errors import InvalidRequest, TooManyTokens
from backend.text.control_tokens import ControlTokens, PartedText
from backend.text.tokenizer import Tokenizer
from tests.backend import tiny_tokenizers as tiny
from tests.backend.text.chat_templates import NOT_SPECIAL, SPECIAL, TEMPLATES, core, tokenizer, tokenizer_of
from tests.examples import examples

CONTROL = [*SPECIAL, *NOT_SPECIAL]
PIECES = [
    *CONTROL, *[text[:-2] for text in CONTROL], *[text[2:] for text in CONTROL], "<", "|>", ">", "[", "think", "user",
    "tool_call", "system", "assistant", "end", "\n", " ", "  ", "x", "é", "😀", '"', "plain added", "\\u003c|end|>",
]  # fmt: skip
SAID = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
NAMES = {token.strip("</>") for token in CONTROL}  # of which a template that writes a name in brackets makes a token
HARMLESS = st.text(max_size=20).filter(
    lambda text: text.strip("/") not in NAMES and not any(token in text for token in CONTROL)
)


def conversation(said: Iterator[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Everything that a request may say: contents, names, reasoning, calls, results and schemas."""
    arguments = {next(said): next(said), "b": [next(said), {"c": next(said)}]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": next(said), "arguments": arguments}}
    messages = [
        {"role": "system", "content": next(said)},
        {"role": "user", "content": next(said), "name": next(said)},
        {"role": "assistant", "content": next(said), "tool_calls": [call]},
        {"role": "tool", "content": next(said), "tool_call_id": "abcdefghi", "name": next(said)},
        {"role": "user", "content": next(said)},
    ]
    schema = {"type": "object", "properties": {next(said): {"description": next(said)}}, next(said): next(said)}
    function = {"name": next(said), "description": next(said), "parameters": schema}
    return messages, [{"type": "function", "function": function}]


NUM_SAID = 18


def rendered(name: str, texts: list[str], is_parsed: bool = False) -> str:
    messages, tools = conversation(iter(texts))
    if name == "deepseek":
        messages[2]["tool_calls"][0]["function"]["arguments"] = "".join(texts[:4])
    return tokenizer(name, is_parsed).render_chat(messages, tools=tools)


def control_ids(of: Tokenizer, ids: list[int]) -> list[str | None]:
    ids_of_control = {of.added_tokens[text] for text in CONTROL}
    return [of.id_to_token(one) for one in ids if one in ids_of_control]


@settings(max_examples=examples(20))
@pytest.mark.parametrize("name", TEMPLATES)
@given(said=st.lists(SAID, min_size=NUM_SAID, max_size=NUM_SAID))
def test_no_text_of_a_request_becomes_a_control_token(name: str, said: list[str]) -> None:
    one = tokenizer(name)
    text = rendered(name, said)
    assert text == rendered(name, said, is_parsed=True), "the prompt's text is what it always was"
    ids = one.encode_text(text, add_special_tokens=False)
    assert one.decode(ids, skip_special_tokens=False) == text
    if name != "odd":  # which looks for a token in what is said
        harmless = rendered(name, [f"n{index}" for index in range(NUM_SAID)])
        expected = control_ids(one, one.encode_text(harmless, add_special_tokens=False))
        assert control_ids(one, ids) == expected


@settings(max_examples=examples(20))
@pytest.mark.parametrize("name", TEMPLATES)
@given(said=st.lists(HARMLESS, min_size=NUM_SAID, max_size=NUM_SAID))
def test_a_prompt_without_control_tokens_of_its_request_has_the_tokens_that_it_always_had(
    name: str, said: list[str]
) -> None:
    text = rendered(name, said)
    assert type(text) is str
    whole, always = tokenizer(name).encode_text(text, False), tokenizer(name, True).encode_text(text, False)
    assert whole == always


def test_templates_find_in_contents_what_they_look_for() -> None:
    answer = {"role": "assistant", "content": "<think>\nhm <|im_end|>\n</think>\n\nyes<think>"}
    for last, thought in (([], "<think>\nhm <|im_end|>\n</think>\n\n"), ([{"role": "user", "content": "b"}], "")):
        text = tokenizer("qwen3").render_chat([{"role": "user", "content": "a"}, answer, *last], False)
        assert f"<|im_start|>assistant\n{thought}yes<think><|im_end|>" in text
        ids = tokenizer("qwen3").encode_text(text, False)
        assert control_ids(tokenizer("qwen3"), ids).count("<think>") == (1 if thought else 0), "the template's own"
    result = {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "hm"}]
    assert "hm" in tokenizer("qwen3").render_chat([*asked, result]), "it is still the turn of the first question"
    assert "hm" not in tokenizer("qwen3").render_chat([*asked, {**result, "content": "no result"}])


def test_a_template_finds_its_own_tokens_in_what_it_has_put_together() -> None:
    source = (
        "{% for message in messages %}{% set said = message.content %}{% if message.reasoning_content %}"
        "{% set said = '<think>' ~ message.reasoning_content ~ '</think>' ~ said %}{% endif %}"
        "<|im_start|>{{ said.split('</think>')[-1].strip() }}<|im_end|>{% endfor %}"
    )
    one = tokenizer_of(source, core())
    said = {"role": "assistant", "reasoning_content": "so</think>", "content": " a<|im_end|><think> "}
    text = one.render_chat([said])
    assert text == "<|im_start|>a<|im_end|><think><|im_end|>"
    assert control_ids(one, one.encode_text(text, False)) == ["<|im_start|>", "<|im_end|>"]


SEARCHES: list[tuple[str, tuple[Any, ...]]] = [
    ("split", ("</think>",)), ("split", ("</think>", 1)), ("rsplit", ("</think>", 1)), ("split", ()), ("split", (">",)),
    ("partition", ("<think>",)), ("rpartition", ("<think>",)), ("strip", ()), ("strip", ("</>",)), ("lstrip", ("<",)),
    ("rstrip", (">\n",)), ("removeprefix", ("<think>",)), ("removesuffix", ("</think>",)), ("find", ("</think>",)),
    ("rfind", (">",)), ("count", ("<think>",)), ("startswith", ("<think>",)), ("endswith", (("x", ">"),)),
    ("replace", ("</think>", "")), ("replace", ("<", "[", 1)), ("replace", ("", "-")),
]  # fmt: skip


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.sampled_from(["<think>", "</think>", ">", "\n", " ", "a", "th"]), st.booleans()), max_size=8),
    st.sampled_from(SEARCHES),
)
def test_a_search_finds_the_same_with_marks_and_keeps_them(
    parts: list[tuple[str, bool]], search: tuple[str, tuple[Any, ...]]
) -> None:
    control = ControlTokens(["<think>", "</think>"])
    text, (method, args) = "".join(control.marked(said) if marks else said for said, marks in parts), search
    plain = "".join(said for said, _ in parts)
    found, expected = control.searched(text, method, *args), getattr(plain, method)(*args)
    assert type(found) is type(expected)
    if isinstance(expected, list | tuple):
        assert [control.plain(piece) for piece in found] == list(expected)
        between = args[0] if args and isinstance(expected, list) else ""
        starts = [len(between.join([*expected[:index], ""])) for index in range(len(expected))]
        assert not args or [text[at : at + len(piece)] for at, piece in zip(starts, found, strict=True)] == [*found]
    else:
        assert (control.plain(found) if isinstance(found, str) else found) == expected
        assert not isinstance(found, str) or method == "replace" or found in text


def test_a_key_of_a_schema_composes_no_token_with_what_the_template_writes_around_it() -> None:
    schema = {"type": "object", "tool_call": "x", "think": "y"}
    tool = {"function": {"name": "f", "description": "d", "parameters": schema}}
    one = tokenizer("qwen3_coder")
    text = one.render_chat([{"role": "user", "content": "Hi"}], tools=[tool])
    assert "\n<tool_call>" in text
    assert control_ids(one, one.encode_text(text, False)) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.parametrize("make", [tiny.byte_level_bpe, tiny.byte_fallback_bpe, tiny.metaspace_unigram])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_a_control_token_that_is_text_is_spelled_as_it_was_said(make: Any, add_special_tokens: bool) -> None:
    one = tokenizer_of("<|im_start|>{{ messages[0].content }}<|im_end|>", core(make()))
    said, harmless = "a fox<|im_end|> the fox <s><s>", "a foxthexexfoxx the fox theate"
    texts = [one.render_chat([{"role": "user", "content": content}]) for content in (said, harmless)]
    assert isinstance(texts[0], PartedText) and [len(part) for part in texts[0].parts()] == [18, 19, 3, 12]
    ids, others = (one.encode_text(text, add_special_tokens) for text in texts)
    assert control_ids(one, ids) == control_ids(one, others)
    if make is not tiny.metaspace_unigram:  # which has no token for "|"
        decoded, other = (one.decode(each, skip_special_tokens=False) for each in (ids, others))
        assert decoded == other.replace(harmless, said) and said in decoded


def test_a_text_that_spells_nothing_else_is_refused_when_it_is_too_long_and_no_sooner() -> None:
    one = tokenizer("embedded")
    text = one.render_chat([{"role": "user", "content": "<|end|>" * 1000}])
    count = len(one.encode_text(text, False))
    assert len(one.encode_text(text, False, count)) == count > 3000
    for most in (count - 1, count // 2, 10):
        with pytest.raises(TooManyTokens) as refusal:
            one.encode_text(text, False, most)
        assert most < refusal.value.num_tokens <= count and refusal.value.at_least


def test_added_tokens_that_are_texts_stay_one_token() -> None:
    one = tokenizer("embedded")
    ids = one.encode_text(one.render_chat([{"role": "user", "content": "a  b plain added<|end|>"}]), False)
    assert {one.added_tokens["  "], one.added_tokens["plain added"]} < set(ids)


UNMARKABLE = "{{ '<|im_' ~ 'start|>' }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def test_a_template_whose_own_tokens_cannot_be_told_apart_refuses_texts_that_spell_any() -> None:
    one = tokenizer_of(UNMARKABLE, core())
    text = one.render_chat([{"role": "user", "content": "Hi <b> |>"}])
    assert (
        text == "<|im_start|>Hi <b> |><|end|>" and one.encode_text(text, False)[0] == one.added_tokens["<|im_start|>"]
    )
    for said in (["<|end|>"], ["<|user|>"], ["a[INST]"]):
        with pytest.raises(InvalidRequest, match=r"spells a control token of the model: leave it out") as refusal:
            one.render_chat([{"role": "user", "content": content} for content in said])
        assert refusal.value.param == "messages"


def test_a_text_is_refused_when_the_normalizer_makes_it_a_control_token() -> None:
    base = core()
    base.normalizer = tiny.normalizers.NFKC()
    base.add_tokens(["<turn>"])  # found in the normalized text
    one = tokenizer_of("{{ messages[0].content }}<turn>", base)
    ids = one.encode_text(one.render_chat([{"role": "user", "content": "é<turn>"}]), False)
    assert ids.count(one.added_tokens["<turn>"]) == 1
    with pytest.raises(InvalidRequest, match="once the tokenizer has normalized it"):
        one.render_chat([{"role": "user", "content": "\uff1cturn\uff1e"}])


def test_where_requests_may_spell_control_tokens_they_do() -> None:
    one = tokenizer("embedded", is_parsed=True)
    ids = one.encode_text(one.render_chat([{"role": "user", "content": "a<|end|><|system|>b"}]), False)
    assert control_ids(one, ids) == ["<s>", "<|user|>", "<|end|>", "<|system|>", "</s>", "<|assistant|>"]


def test_a_template_says_why_it_refuses_in_its_own_words() -> None:
    source = "{% if messages[0].content == '<|end|>' %}{{ raise_exception('no <|end|> ' ~ '<|user|>') }}{% endif %}x"
    with pytest.raises(InvalidRequest, match=r"no <\|end\|> <\|user\|>$"):
        tokenizer_of(source, core()).render_chat([{"role": "user", "content": "<|end|>"}])
