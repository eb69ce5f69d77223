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
from gateway.http.json_body import MAX_ELEMENTS, MAX_SKELETON, JsonBody, JsonScanner, Wire, read
from gateway.openai import bodies
from gateway.workers.messages import error_message, error_of

TEXTS = st.text(st.sampled_from('ab"\\/\n\u00e9\u4e2d\U0001f600\u0000 ,:[]{}0'), max_size=90)
IDS = st.lists(st.integers(0, 10**6), max_size=60)
CONTENT = st.one_of(TEXTS, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3))
NESTED = st.recursive(
    st.one_of(TEXTS, IDS, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}), max_size=4),
        "prompt": st.one_of(TEXTS, IDS, st.lists(st.one_of(TEXTS, IDS, st.integers(0, 9)), max_size=6)),
        "tokens": IDS,
        "tools": NESTED,
        "n": st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False)),
    },
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a body of a hundred bytes is read in pieces."""
    for name, value in {"BLOCK": 16, "PIECE": 2, "MAX_SKELETON": 4096, "CROWDED": 12}.items():
        monkeypatch.setattr(json_body, name, value)


def scanned(raw: bytes, block: int, in_pieces: bool = True) -> JsonBody:
    scanner = JsonScanner(1024)
    for start in range(0, len(raw), block):
        scanner.feed(raw[start : start + block])
    if not in_pieces:
        return scanner.body()
    return JsonBody(raw, sorted([*scanner._texts, *scanner._runs]))


def value_of(body: JsonBody) -> Any:
    try:
        return body.loads()
    except BadRequest:
        return "not JSON"


def plain(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return "not JSON"


@pytest.mark.usefixtures("small")
@given(body=BODIES, is_ascii=st.booleans(), indent=st.sampled_from([None, 0, 3]), block=st.integers(1, 300))
def test_a_body_that_is_read_in_pieces_is_what_it_is_whole(
    body: dict[str, Any], is_ascii: bool, indent: int | None, block: int
) -> None:
    raw = json.dumps(body, ensure_ascii=is_ascii, indent=indent).encode()
    assert value_of(scanned(raw, block)) == body


@pytest.mark.usefixtures("small")
@given(body=BODIES, block=st.integers(1, 300), data=st.data())
def test_what_is_not_json_is_not_json_in_pieces_either(body: dict[str, Any], block: int, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(body).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b'"', b"\\", b",", b"\xff", b"1"])
        )
        raw = raw or bytearray(b"0")
    assert value_of(scanned(bytes(raw), block)) == plain(bytes(raw))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "text",
    [b"\\\\" * 40, b"a" + b"\\\\" * 40, b'\\"' * 40, b"\\ud83d\\ude00" * 12, b"x\\ud83d\\ude00" * 12, b"\\u00e9" * 20,
     "\u00e9".encode() * 40, "a\U0001f600".encode() * 20, b"\\\\u00e9" * 12, b"abc" * 30],
)  # fmt: skip
@pytest.mark.parametrize("indent", range(17))
def test_no_character_is_cut(text: bytes, indent: int) -> None:
    raw = b'{"prompt": "' + b"." * indent + text + b'"}'
    for block in (1, 7, 16, len(raw)):
        assert scanned(raw, block).loads() == orjson.loads(raw)


NOT_JSON = {
    "lone surrogate": b'"' + b"\\ud83d" * 20 + b'"',
    "continuation bytes": b'"' + b"\x80" * 60 + b'"',
    "control characters": b'"' + b"\n" * 60 + b'"',
    "no number": b"[1," + b" " * 70 + b",2]",
    "two commas": b"[" + b"1," * 40 + b"," + b"1," * 40 + b"1]",
    "no comma": b"[" + b"1, " * 40 + b"1 1, 1]",
    "leading zero": b"[1," + b"01," * 40 + b"1]",
    "ids in an object": b'{"a":' + b"1," * 40 + b"1}",
    "open": b'"' + b"a" * 60,
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON.keys())
@pytest.mark.parametrize("block", [1, 16, 64, 300])
def test_what_is_not_json_is_refused(raw: bytes, block: int) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        scanned(raw, block).loads()


def scan(raw: bytes, block: int = json_body.BLOCK) -> JsonBody:
    return scanned(raw, block, in_pieces=False)


MEBIBYTE = 2**20
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
@pytest.mark.parametrize("block", [json_body.BLOCK, 1000])
def test_a_body_of_too_many_elements_is_refused_in_the_block_that_has_them(raw: bytes, block: int) -> None:
    with pytest.raises(RequestTooLarge, match=r"more than \d+ (elements|token ids)"):
        scanned(raw[: len(raw) // 8], block)


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
def test_a_text_of_4_mebibytes_is_read_whatever_it_holds(text: str) -> None:
    assert scan(orjson.dumps({"prompt": text})).loads() == {"prompt": text}


def test_a_long_text_is_read_however_deep_it_lies() -> None:
    arguments = {"function": {"name": "write", "arguments": json.dumps({"text": "y" * 2000})}}
    value: object = [arguments, {"x" * 2000: "z" * 2000}]
    for _ in range(100):
        value = {"properties": [value]}
    body = {"messages": [{"role": "user", "content": "x" * 2 * MEBIBYTE}], "tools": value}
    assert scan(orjson.dumps(body)).loads() == body


def test_megabytes_that_are_neither_text_nor_token_ids_are_refused() -> None:
    for filler in (b" ", b"1", b"1" * 90 + b".5,"):
        with pytest.raises(RequestTooLarge, match="beside its long texts and token ids"):
            scan(b'{"prompt":[' + filler * (1 + MAX_SKELETON // len(filler)) + b"1]}")


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
        read(Choice, JsonBody.of(body))
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
def test_what_is_wrong_is_said_in_our_own_words(form: Any, changes: dict[str, Any]) -> None:
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
            "tools[0].function.name must be a string of the pattern ^[a-zA-Z0-9_.-]{1,64}$, got 'a b'.",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type must be 'function', got 'web_search'."),
    ],
)
def test_a_complaint_names_the_field_its_bound_and_what_came(fields: dict[str, Any], message: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    with pytest.raises(BadRequest) as refusal:
        bodies.CHAT.read(JsonBody(orjson.dumps(body)))
    assert refusal.value.message == message
