import json
import re
from typing import Any, Literal, get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from pydantic_core.core_schema import ErrorType

from gateway.errors import BadRequest, RequestTooLarge
from gateway.http import json_body
from gateway.http.json_body import MAX_ELEMENTS, JsonBody, JsonScanner, Wire, parse_body
from gateway.openai import bodies
from gateway.workers.messages import error_message, error_of

MEBIBYTE = 2**20
TEXTS = st.text(st.sampled_from('ab"\\/\n\u00e9\u0000 ,:[]{}0'), max_size=90)
BODIES = st.recursive(
    st.one_of(
        TEXTS, st.lists(st.integers(0, 10**6), max_size=60), st.none(), st.floats(allow_nan=False, allow_infinity=False)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)


def scan(raw: bytes, block: int = json_body.BLOCK_BYTES) -> JsonBody:
    scanner = JsonScanner(1024)
    for start in range(0, len(raw), block):
        scanner.feed(raw[start : start + block])
    return scanner.body()


def num_elements(value: Any) -> int:
    """Count the opening brackets, colons and commas that a value is written with."""
    match value:
        case list():
            return 1 + max(0, len(value) - 1) + sum(map(num_elements, value))
        case dict():
            return 1 + len(value) + max(0, len(value) - 1) + sum(map(num_elements, value.values()))
    return 0


@given(body=BODIES, is_ascii=st.booleans(), indent=st.sampled_from([None, 0, 3]), block=st.integers(1, 300))
def test_elements_are_counted_outside_of_strings_for_every_cut_into_blocks(
    body: Any, is_ascii: bool, indent: int | None, block: int
) -> None:
    raw = json.dumps(body, ensure_ascii=is_ascii, indent=indent).encode()
    scanner = JsonScanner(1024)
    for start in range(0, len(raw), block):
        scanner.feed(raw[start : start + block])
    assert scanner._elements + scanner._ids == num_elements(body)
    assert scanner.body().loads() == body


COSTLY = {
    "unknown keys": b"{" + b",".join(b'"field%d":1' % n for n in range(300_000)) + b"}",
    "lists of lists": b'{"prompt":[' + b"[0]," * MEBIBYTE + b"[]]}",
    "empty objects": b'{"prompt":[' + b"{}," * MEBIBYTE + b"{}]}",
    "content parts": b'{"messages":[{"role":"user","content":['
    + b'{"type":"text","text":""},' * 150_000 + b'{"type":"text","text":""}]}]}',
    "stops": b'{"stop":[' + b'"",' * MEBIBYTE + b'""]}',
    "quotes": b'"' * 4 * MEBIBYTE,
    "token ids": b'{"prompt":[' + b"1," * 2 * MEBIBYTE + b"1]}",
    "floats": b'{"prompt":[' + b"1.5," * MEBIBYTE + b"1]}",
    "short runs": b'{"prompt":[' + b"[0,0,0]," * (MEBIBYTE // 2) + b"[]]}",
}  # fmt: skip


@pytest.mark.parametrize("raw", COSTLY.values(), ids=COSTLY.keys())
@pytest.mark.parametrize("block", [json_body.BLOCK_BYTES, 1000])
def test_a_body_of_too_many_elements_is_refused_in_the_block_that_has_them(raw: bytes, block: int) -> None:
    with pytest.raises(RequestTooLarge, match=r"more than \d+ (elements|token ids)"):
        scan(raw[: len(raw) // 8], block)


def test_a_prompt_of_as_many_token_ids_as_a_long_context_holds_is_read() -> None:
    ids = list(range(131_072))
    scanner, raw = JsonScanner(131_072), orjson.dumps({"prompt": ids, "model": "m"})
    for start in range(0, len(raw), 50_000):
        scanner.feed(raw[start : start + 50_000])
    assert scanner.body().loads() == {"prompt": ids, "model": "m"}


def test_a_conversation_of_2048_messages_is_read() -> None:
    for content in ("Hi", "x" * 500, "y" * 1900):
        body = {"messages": [{"role": "user", "name": "me", "content": content}] * 2048}
        assert scan(orjson.dumps(body)).loads() == body


@pytest.mark.parametrize("text", ["x" * 4 * MEBIBYTE, "\n" * 2 * MEBIBYTE, "\U0001f600" * MEBIBYTE, '{"[,' * MEBIBYTE])
def test_any_text_of_4_mebibytes_is_read(text: str) -> None:
    assert scan(orjson.dumps({"prompt": text})).loads() == {"prompt": text}


def test_the_number_of_elements_that_may_come_is_exact() -> None:
    assert scan(b"[" + b"0.5," * (MAX_ELEMENTS - 1) + b"0]").loads()[-1] == 0
    with pytest.raises(RequestTooLarge):
        scan(b"[" + b"0.5," * MAX_ELEMENTS + b"0]")


class Choice(Wire):
    mode: Literal["none", "auto", "required"] = "auto"
    count: int = Field(default=1, ge=1, le=5)


@pytest.mark.parametrize(
    ("body", "discreet"),
    [
        (b'{"mode": "my secret"}', "mode must be 'none', 'auto' or 'required'."),
        (b'{"mode": ["my secret"]}', "mode must be 'none', 'auto' or 'required'."),
        (b'{"count": "my secret"}', "count must be an integer."),
        (b'{"count": 6}', "count must be at most 5."),
        (b'{"my secret": 6}', "The body is not valid."),
    ],
)
def test_logs_say_what_a_field_must_be_in_words_of_ours(body: bytes, discreet: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_body(Choice, JsonBody.of(body))
    assert refused.value.discreet_message == discreet
    told = error_of(error_message(refused.value))  # as an HTTP worker tells the engine's process
    assert isinstance(told, BadRequest) and told.discreet_message == discreet


FORMS = st.sampled_from([bodies.CHAT, bodies.COMPLETION, bodies.TOKENIZE, bodies.DETOKENIZE])
FIELDS = sorted({*bodies.ChatBody.__annotations__, *bodies.CompletionBody.__annotations__, "tokens"})
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "x", "x" * 9999, "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "function", "name", "tool_calls", "json", "choice", "x"]), inner
        )
    ),
    max_leaves=9,
)
FOREIGN_WORDS = re.compile(
    r"(?i)\b(input|string|list|dictionary|value|integer|number|boolean) should|value error|valid \w+$"
)


@given(form=FORMS, changes=st.dictionaries(st.sampled_from(FIELDS), ODD, min_size=1, max_size=3))
def test_body_errors_are_told_in_our_own_words(form: Any, changes: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **changes}
    complaint: BadRequest | None = None
    try:
        form.read(JsonBody(json.dumps(body).encode()))
    except BadRequest as refusal:
        complaint = refusal
    if complaint is not None:
        assert not FOREIGN_WORDS.search(complaint.message), complaint.message
        assert complaint.message.endswith(".") and complaint.message.startswith(complaint.param or "The body")


@pytest.mark.parametrize("kind", sorted(get_args(ErrorType)))
def test_no_kind_of_error_has_words_of_the_library(kind: str) -> None:
    context = {"expected": "'a'", "ge": 1, "le": 1, "max_length": 1, "min_length": 1, "pattern": "x"}
    error: Any = {"type": kind, "loc": ("a", 0), "msg": "Input should be good", "input": "bad", "ctx": context}
    refusal = json_body._bad_request(error)
    assert refusal.param == "a[0]" and "should" not in refusal.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": [""]}, "bad_words[0] must be at least 1 character long, got ''."),
        ({"cache_salt": "x" * 300}, "cache_salt must be at most 256 characters long, got a string of 300 characters."),
        ({"n": 0}, "n must be at least 1, got 0."),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name must be a string of the pattern ^[a-zA-Z0-9_.-]{1,128}$, got 'a b'.",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type must be 'function', got 'web_search'."),
    ],
)
def test_a_complaint_names_the_field_its_bound_and_what_came(fields: dict[str, Any], message: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    with pytest.raises(BadRequest) as refusal:
        bodies.CHAT.read(JsonBody(orjson.dumps(body)))
    assert refusal.value.message == message
