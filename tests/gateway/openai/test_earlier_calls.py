"""Every answer of a model may be sent back: no template ends a conversation for it."""

import time
from typing import Any

import orjson
import pytest

from backend.errors import InvalidRequest
from backend.text.chat_template import CPU_SECONDS
from gateway.http.json_body import JsonBody
from gateway.openai.conversation import Conversation
from gateway.openai.limits import Limits
from gateway.openai.requests import parse_chat_request
from tests.backend.text.chat_templates import TEMPLATES, core, tokenizer, tokenizer_of

LIMITS = Limits(vocab_size=1000, max_model_len=4096)
MALFORMED = [
    "{}", "", " ", "\n", "null", "[]", "[1, 2]", "5", "-0.5", "true", '"x"', '{"city": "Os', "{'city': 'Oslo'}",
    "{city: 1}", '{"a": NaN}', "{}}", "Oslo", '{"a": 1} {"b": 2}', "\ufeff{}", None, {}, {"city": "Oslo"}, [], 5, True,
]  # fmt: skip
FAMILIES = [name for name in TEMPLATES if name != "odd"]


def conversation(*turns: Any) -> Conversation:
    messages = [{"role": "user", "content": "time?"}, *turns, {"role": "user", "content": "thanks"}]
    return parse_chat_request(JsonBody(orjson.dumps({"model": "m", "messages": messages})), LIMITS).conversation


def call(arguments: Any, call_id: str = "abcdefghi", name: str = "now") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(content: Any = "12:00", call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("arguments", MALFORMED, ids=repr)
def test_a_call_may_have_any_arguments(name: str, arguments: Any) -> None:
    text = conversation(answer(call(arguments)), result()).render(tokenizer(name))
    assert "now" in text and text.index("12:00") < text.index("thanks")
    if arguments == {"city": "Oslo"}:
        assert "Oslo" in text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "turns",
    [
        [answer(call("{}"), content="")],
        [answer(call("{}"), content="One moment."), result()],
        [answer(call("{}"), reasoning_content="hm"), result()],
        [
            answer(call('{"a": 1}'), call("null", "bcdefghij"), call('{"a', "cdefghijk")),
            result(),
            result("x", "bcdefghij"),
        ],
        [answer(call("{}", "call_0123456789abcdef01234567")), result(call_id="call_0123456789abcdef01234567")],
        [answer({"function": {"name": "now", "arguments": "{}"}}), result()],
        [answer(call("{}", name="get weather! <b>")), result([{"type": "text", "text": "1"}] * 2)],
        [answer(call("{}")), result(None)],
        [answer(call("{}")), result("")],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "assistant", "content": "", "tool_calls": None}],
        [{"role": "assistant", "content": None, "reasoning_content": "cut in its though"}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": "cut \ufffd"}],
        [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}],
        [{"role": "assistant", "content": "<think>\ncut in its though"}],
        [{"role": "assistant", "content": '<tool_call>\n{"name": "f", "argu'}],
    ],
    ids=lambda turns: orjson.dumps(turns).decode()[:60],
)
def test_an_answer_may_be_sent_back(name: str, turns: Any) -> None:
    assert "thanks" in conversation(*turns).render(tokenizer(name))


def test_arguments_that_do_not_parse_are_told_where_the_template_takes_them() -> None:
    cut = answer(call('{"city": "Os'))
    assert '{"city": "Os' in conversation(cut).render(tokenizer("embedded"))
    assert '"arguments": {"city": "Os}' in conversation(cut).render(tokenizer("qwen3"))
    assert "<tool_call>now</tool_call>" in conversation(cut).render(tokenizer("glm"))


def test_several_calls_are_told_one_by_one_with_their_results_where_the_template_takes_no_other() -> None:
    calls = answer(call('{"a": 1}'), call('{"b": 2}', "bcdefghij"), content="Two.")
    text = conversation(calls, result("second", "bcdefghij"), result("first"), result("of none", "x")).render(
        tokenizer("llama3")
    )
    places = [text.index(one) for one in ('{"a": 1}', "first", '{"b": 2}', "second", "of none", "thanks")]
    assert places == sorted(places)


def test_ids_fit_the_template_and_still_name_their_results() -> None:
    one = tokenizer("mistral")
    text = conversation(answer(call("{}", "call_1"), call("{}", "abcdefghi")), result("x", "call_1")).render(one)
    first = text.split('"id": "')[1][:9]
    assert first.isalnum() and f'"call_id": "{first}"' in text and '"id": "abcdefghi"' in text


def test_messages_refused_in_every_form_are_refused_for_the_first_reason() -> None:
    source = "{{ raise_exception('no ' ~ (messages[1].tool_calls[0].function.arguments | string)) }}"
    with pytest.raises(InvalidRequest, match=r"refuses these messages: no \{\"a$"):
        conversation(answer(call('{"a'))).render(tokenizer_of(source, core()))


def test_a_template_that_takes_all_time_is_asked_once() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    one = tokenizer_of("{% if messages[1].tool_calls %}" + endless + "{% endif %}", core())
    before = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"more than 0\.5 s of CPU"):
        conversation(answer(call('{"a'))).render(one)
    assert time.thread_time() - before < 2 * CPU_SECONDS
