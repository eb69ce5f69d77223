import json
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.sampling_params import SamplingParams
from gateway.errors import ApiError
from gateway.http.json_body import JsonBody
from gateway.openai import bodies
from gateway.openai import requests as openai
from gateway.openai.bodies import MAX_PROMPTS
from gateway.openai.conversation import Conversation
from gateway.openai.limits import Limits
from gateway.openai.messages import ChatMessage
from gateway.openai.requests import ChatRequest, CompletionRequest, TokenDetails
from tests.examples import examples


def of_bytes(parse: Callable[..., Any]) -> Callable[..., Any]:
    return lambda raw, *args, **fields: parse(JsonBody(raw), *args, **fields)


parse_chat_request = of_bytes(openai.parse_chat_request)
parse_completion_request = of_bytes(openai.parse_completion_request)
parse_tokenize_request = of_bytes(openai.parse_tokenize_request)
parse_detokenize_request = of_bytes(openai.parse_detokenize_request)
LIMITS = Limits(vocab_size=1000, max_model_len=4096)
PARSERS: list[Callable[[bytes], object]] = [
    partial(parse_chat_request, limits=LIMITS),
    partial(parse_completion_request, limits=LIMITS),
    partial(parse_detokenize_request, limits=LIMITS),
    parse_tokenize_request,
]
HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_chat_request(orjson.dumps({"model": "m", "messages": HI, **fields}), LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion_request(orjson.dumps({"model": "m", "prompt": "Hi", **fields}), LIMITS)


def refused(parse: Any, *args: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        parse(*args, **fields)
    assert refusal.value.status == 400
    assert refusal.value.message.endswith(".")
    assert len(refusal.value.message) < 400
    return refusal.value


def test_the_least_chat_request_gets_the_defaults() -> None:
    assert chat() == ChatRequest(
        model="m", conversation=Conversation(({"role": "user", "content": "Hi"},)), sampling=SamplingParams(),
        stream=False,
        include_usage=False, continuous_usage=False, include_stop=False, skip_special_tokens=True,
        add_special_tokens=False,
        service_tier=None, user=None, shows_reasoning=True,
    )  # fmt: skip


def test_the_least_completion_request_gets_the_defaults() -> None:
    assert completion() == CompletionRequest(
        model="m", prompts=("Hi",), sampling=SamplingParams(), stream=False, include_usage=False,
        continuous_usage=False, include_stop=False,
        skip_special_tokens=True, add_special_tokens=True, service_tier=None, user=None,
    )  # fmt: skip


def test_every_supported_field_arrives() -> None:
    request = chat(
        stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, max_tokens=5, temperature=0,
        top_p=0.5, presence_penalty=-2, frequency_penalty=2, seed=-1, stop=["a", "b"], top_k=40, min_p=0.1,
        repetition_penalty=1.1, min_tokens=2, stop_token_ids=[0, 999], ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, add_special_tokens=True, add_generation_prompt=False, service_tier="flex",
        user="u", metadata={"k": "v"}, prompt_cache_key="k", safety_identifier="s",
    )  # fmt: skip
    assert request.sampling == SamplingParams(
        max_tokens=5, min_tokens=2, temperature=0, top_p=0.5, top_k=40, min_p=0.1, presence_penalty=-2,
        frequency_penalty=2, repetition_penalty=1.1, seed=-1, stop=("a", "b"), stop_token_ids=(0, 999), ignore_eos=True,
    )  # fmt: skip
    assert request.stream
    assert request.include_usage
    assert request.include_stop
    assert not request.skip_special_tokens
    assert request.add_special_tokens
    assert not request.conversation.add_generation_prompt
    assert (request.service_tier, request.user) == ("flex", "u")


def test_null_means_absent() -> None:
    assert chat(**dict.fromkeys(bodies.ChatBody.__optional_keys__)) == chat()
    assert completion(**dict.fromkeys(bodies.CompletionBody.__optional_keys__)) == completion()


NEUTRAL = {
    "best_of": 1, "logit_bias": {}, "store": False, "response_format": {"type": "text"}, "logprobs": False,
    "top_logprobs": 0, "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [],
    "function_call": "auto", "modalities": ["text"], "chat_template_kwargs": {},
    "use_beam_search": False, "echo": False, "documents": [], "continue_final_message": False,
}  # fmt: skip
UNSUPPORTED: dict[str, list[Any]] = {
    "best_of": [3],
    "modalities": [["text", "audio"]], "audio": [{}], "web_search_options": [{}],
    "chat_template": ["{{ x }}"],
}  # fmt: skip


def test_unsupported_fields_pass_while_they_mean_nothing() -> None:
    assert chat(**NEUTRAL) == chat()
    assert completion(echo=False, suffix="", n=1, best_of=1, logprobs=None) == completion()


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in UNSUPPORTED for value in UNSUPPORTED[field]])
def test_unsupported_fields_are_refused_by_name(field: str, value: Any) -> None:
    refusal = refused(chat, **{field: value})
    assert refusal.param == field
    assert refusal.message.startswith(f"{field} is not supported here; leave it out or send null")


def test_a_chat_is_told_of_log_probabilities_as_far_as_it_asks() -> None:
    assert chat(logprobs=True, top_logprobs=5).details == TokenDetails(top=5)
    assert chat(logprobs=True).sampling.logprobs == chat(logprobs=True, top_logprobs=0).sampling.logprobs == 0
    assert chat(logprobs=False, top_logprobs=0, return_tokens_as_token_ids=True) == chat()
    asked = chat(prompt_logprobs=3, return_token_ids=True, logprobs=True, return_tokens_as_token_ids=True)
    assert asked.details == TokenDetails(0, 3, True, True)
    assert (asked.sampling.logprobs, asked.sampling.prompt_logprobs) == (0, 3)
    assert refused(chat, top_logprobs=1).param == refused(chat, top_logprobs=1, logprobs=False).param == "top_logprobs"
    assert refused(chat, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert refused(chat, max_tokens=0).param == "max_tokens"


def test_an_echoed_completion_computes_the_log_probabilities_of_its_prompt() -> None:
    request = completion(logprobs=2, echo=True)
    assert (request.echo, request.is_prompt_alone, request.details) == (True, False, TokenDetails(top=2))
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 2)
    assert completion(logprobs=2).sampling.prompt_logprobs is completion(echo=True).sampling.prompt_logprobs is None
    assert completion(logprobs=2, echo=True, prompt_logprobs=5).sampling.prompt_logprobs == 5
    alone = completion(echo=True, max_tokens=0, stream=True)
    assert (alone.is_prompt_alone, alone.sampling.max_tokens) == (True, 1)
    refusal = refused(completion, max_tokens=0)
    assert refusal.param == "max_tokens" and "only with echo" in refusal.message


@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "1", []])
def test_the_most_likely_tokens_are_0_to_20(value: Any) -> None:
    assert refused(completion, logprobs=value).param == "logprobs"
    assert refused(chat, logprobs=True, top_logprobs=value).param == "top_logprobs"
    for parse in (chat, completion):
        assert refused(parse, prompt_logprobs=value).param == "prompt_logprobs"


def test_the_best_of_several_answers_is_told_by_their_log_probabilities() -> None:
    request = completion(best_of=4, n=2)
    assert (request.num_answers, request.num_shown, request.sampling.logprobs) == (4, 2, 0)
    assert request.details == TokenDetails()
    assert completion(best_of=4, logprobs=3).sampling.logprobs == 3
    assert (completion(n=3).num_answers, completion(n=3).num_shown) == (3, 3)
    for fields in ({"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}, {"best_of": 129}, {"best_of": 0}):
        assert refused(completion, **fields).param == "best_of"
    refusal = refused(completion, prompt=["a", "b"], best_of=65)
    assert refusal.param == "best_of" and "best_of = 65" in refusal.message
    assert completion(best_of=1, stream=True).num_answers == 1


def test_a_prompt_that_is_cut_may_be_longer_than_the_context() -> None:
    assert completion(prompt=[1] * 5000, truncate_prompt_tokens=100).kept_tokens == 100
    assert completion(prompt=[1] * 5000, truncate_prompt_tokens=-1).kept_tokens == -1
    assert refused(completion, prompt=[1] * 16_385, truncate_prompt_tokens=-1).code == "context_length_exceeded"
    for value in (0, -2, 1.5, True, "1"):
        for parse in (chat, completion):
            assert refused(parse, truncate_prompt_tokens=value).param == "truncate_prompt_tokens"


@pytest.mark.parametrize("value", ["x", [""], [5], ["x" * 257], ["x"] * 129, {}, [None]])
def test_bad_words_are_a_bounded_list_of_texts(value: Any) -> None:
    for parse in (chat, completion):
        assert parse(bad_words=["a", "b c"]).bad_words == ("a", "b c")
        assert str(refused(parse, bad_words=value).param).startswith("bad_words")


@pytest.mark.parametrize("value", [0, -1, 129, True, 1.0, "1", []])
def test_the_answers_to_a_prompt_are_1_to_128_in_a_request(value: Any) -> None:
    for parse, fields in ((chat, {}), (completion, {"prompt": "1"})):
        assert refused(parse, **fields, n=value).param == "n"
        assert parse(**fields, n=128).num_answers == 128
        assert parse(**fields).num_answers == parse(**fields, n=None).num_answers == 1
    assert completion(prompt=["a", "b"], n=64).num_answers == 64
    assert refused(completion, prompt=["a", "b"], n=65).param == "n"
    assert refused(chat, n=129).message == "n must be at most 128, got 129."


@pytest.mark.parametrize("value", ["", "x" * 257, 5, True, ["x"], {}])
def test_a_cache_salt_is_a_string_of_1_to_256_characters(value: Any) -> None:
    for parse, fields in ((chat, {}), (completion, {"prompt": "1"})):
        refusal = refused(parse, **fields, cache_salt=value)
        assert refusal.param == "cache_salt" and "cache_salt" in refusal.message
        assert parse(**fields, cache_salt="x" * 256).cache_salt == "x" * 256
        assert parse(**fields, cache_salt=None) == parse(**fields)


def test_functions_are_refused_with_the_name_that_they_have_today() -> None:
    assert (
        refused(chat, functions=[{"name": "f"}]).message == "functions is not a field of this API: send tools instead."
    )


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_of_minus_one_token_is_one_of_open_length(field: str) -> None:
    assert chat(**{field: -1}) == chat()


@pytest.mark.parametrize("value", [-2, 0, 1.0, "5", True, 10**30, [], 2**63])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_token_limits_are_positive_integers(field: str, value: Any) -> None:
    raw = json.dumps({"model": "m", "messages": HI, field: value}).encode()
    assert refused(parse_chat_request, raw, LIMITS).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3), ("temperature", True), ("temperature", "0.5"), ("temperature", 1e300), ("top_p", -0.1),
        ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("presence_penalty", 2.1), ("repetition_penalty", 0),
        ("seed", 2**64 - 1), ("seed", "x"), ("min_tokens", -1), ("ignore_eos", 1), ("stream", "yes"),
        ("stop", 5), ("stop", ["a"] * 65), ("stop", "x" * 2000), ("stop_token_ids", [-1]),
        ("stop_token_ids", [1000]), ("stop_token_ids", [True]), ("service_tier", "gold"), ("user", 5),
        ("metadata", []), ("stream_options", {"include_usage": True}), ("stream_options", []), ("model", 5),
        ("model", None), ("messages", None), ("messages", []), ("messages", "Hi"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    param = refused(chat, **{field: value}).param
    assert param is not None
    assert param.split("[")[0] == field


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].image_url"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}] * 65}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "content": None, "tool_calls": [{"type": "x"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "user", "content": "x", "images": ["x"]}, "messages[1].images"),
        ("Hi", "messages[1]"),
        (None, "messages[1]"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message: Any, param: str) -> None:
    assert refused(chat, messages=[*HI, message, {"also": "wrong"}]).param == param


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_only_an_answer_may_have_no_content(role: str, content: dict[str, None]) -> None:
    messages = [*HI, {"role": role, **content}]
    for parse in (chat, lambda **fields: parse_tokenize_request(orjson.dumps(fields))):
        refusal = refused(parse, messages=messages)
        assert (refusal.param, "is required" in refusal.message) == ("messages[1].content", True)
    assert chat(messages=[*HI, {"role": "assistant", **content}]).conversation.messages[1]["content"] == ""


def test_messages_become_what_templates_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts, "name": "Ann"}, answer]
    assert chat(messages=messages).conversation.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": ""},
    )


def test_a_stop_is_a_text_or_several_and_an_empty_one_is_none() -> None:
    assert refused(chat, stop=5).message == "stop must be a string, or an array of strings, got 5."
    for stop, taken in (("", ()), ([""], ()), (["", "a", ""], ("a",)), ("a", ("a",)), ([], ()), (None, ())):
        assert chat(stop=stop).sampling.stop == taken


def test_of_two_token_limits_the_larger_counts() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).sampling.max_tokens == 9
    assert chat(max_tokens=9, max_completion_tokens=5).sampling.max_tokens == 9
    assert chat(max_completion_tokens=5).sampling.max_tokens == 5
    fields = [chat(max_tokens=5, max_completion_tokens=n).length_field for n in (4, 5, 6)]
    assert fields == ["max_tokens", "max_tokens", "max_completion_tokens"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 999], ((1, 2, 999),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_many(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"), ({}, "prompt"), (5, "prompt"), ([], "prompt"), ([[]], "prompt[0]"), ([1000], "prompt"),
        ([-1], "prompt"), ([1, True], "prompt"), ([True], "prompt[0]"), ([1, 2.0], "prompt"), ([1, "a"], "prompt"),
        (["a", 1], "prompt[1]"), ([[1], [1000]], "prompt[1]"), ([["a"]], "prompt[0]"), ([1, 2**63], "prompt"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"), ([[[1]]], "prompt[0]"),
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused_by_their_place(prompt: Any, param: str) -> None:
    assert refused(completion, prompt=prompt).param == param


def test_an_over_long_prompt_is_refused_with_both_numbers() -> None:
    refusal = refused(completion, prompt=[1] * 5000)
    assert (refusal.code, refusal.param) == ("context_length_exceeded", "prompt")
    assert "4096" in refusal.message
    assert "5000" in refusal.message


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff", b'{"model": NaN}', b'{"model": 1e400}', b"[" * 100_000,
        b'{"a":' * 100_000, b'{"model": "\\ud800"}', b'{"\\ud800": 1}', b'{"model": "\xed\xa0\x80"}', b"{}{}",
        b'{"seed": ' + b"9" * 100_000 + b"}", b"\xef\xbb\xbf{}", b"\x00",
    ],
)  # fmt: skip
def test_a_text_that_is_no_json_object_is_refused(raw: bytes) -> None:
    for parse in PARSERS:
        assert refused(parse, raw).param is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"messages": HI * 40_000}, "messages"),
        ({"messages": [{}] * 100_000}, "messages[0].role"),
        ({"messages": [{str(i): 0 for i in range(100_000)}]}, "messages[0]"),
        ({str(i): 0 for i in range(100_000)}, None),
        ({"stop_token_ids": [-1] * 100_000}, "stop_token_ids"),
        ({"messages": HI, "images": ["x" * 1_000_000]}, "images"),
    ],
)
def test_huge_bodies_are_refused_at_their_first_fault(fields: dict[str, Any], param: str | None) -> None:
    assert refused(chat, **fields).param == param


def test_tokenize_takes_a_prompt_or_messages() -> None:
    request = parse_tokenize_request(b'{"prompt": "Hi", "return_token_strs": true}')
    assert (request.prompt, request.conversation, request.add_special_tokens) == ("Hi", None, True)
    assert request.return_token_strs
    request = parse_tokenize_request(orjson.dumps({"model": "m", "messages": HI, "add_generation_prompt": False}))
    assert (request.prompt, request.add_special_tokens) == (None, False)
    assert request.conversation == Conversation(tuple(HI), add_generation_prompt=False)
    assert refused(parse_tokenize_request, b"{}").param == "prompt"
    assert refused(parse_tokenize_request, orjson.dumps({"prompt": "", "messages": HI})).param == "prompt"


def test_detokenize_takes_ids_of_the_vocabulary() -> None:
    assert parse_detokenize_request(b'{"tokens": [1, 2]}', LIMITS).tokens == (1, 2)
    assert parse_detokenize_request(b'{"tokens": []}', LIMITS).tokens == ()
    for tokens in ([1000], [-1], ["a"], "a", None):
        assert refused(parse_detokenize_request, orjson.dumps({"tokens": tokens}), LIMITS).param == "tokens"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(
    {*bodies.ChatBody.__annotations__, *bodies.CompletionBody.__annotations__, *bodies.TokenizeBody.__annotations__}
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), JSON, max_size=4)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from([*ChatMessage.__annotations__, "x"]), JSON | st.just("user"), max_size=3),
    max_size=3,
)


def survives(raw: bytes) -> None:
    for parse in PARSERS:
        try:
            parse(raw)
        except ApiError as refusal:
            json.loads(refusal.to_body())


@given(raw=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    survives(raw)


@settings(max_examples=examples(80, at_night=4000))
@given(changes=OBJECTS, messages=st.just(HI) | MESSAGES, prompt=JSON)
def test_any_change_of_a_request_is_parsed_or_refused(changes: dict[str, Any], messages: Any, prompt: Any) -> None:
    survives(json.dumps({"model": "m", "messages": messages, **changes}).encode())
    survives(json.dumps({"model": "m", "prompt": prompt, **changes}).encode())


def test_tools_become_a_grammar_for_the_engine() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    assert not chat().offers_tools and not chat().may_end
    assert chat(tools=[tool]).offers_tools and not chat(tools=[tool], tool_choice="none").offers_tools
    single = {"parallel_tool_calls": False}
    assert chat(tools=[tool], **single).may_end  # the first call ends the answer, and no grammar does
    assert not chat(tools=[strict], **single).may_end and not chat(tools=[tool], tool_choice="required").may_end


def test_tools_whose_calls_are_constrained_count_as_a_grammar() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert chat(tools=[tool]).grammar_sizes() == []
    required = chat(tools=[tool], tool_choice="required", response_format=asked)
    assert required.grammar_sizes() == [
        (17, "response_format.json_schema.schema"),
        (len(orjson.dumps([tool])), "tools"),
    ]
