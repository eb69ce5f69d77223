"""A model whose prompts open a block of reasoning: what it thinks is told apart, counted and bounded."""

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest

from backend.model.hub import resolve_model
from tests.gateway.server_process import PATIENCE, ServerProcess, running_server

ASK: Any = [{"role": "user", "content": "Count from 3 to 12."}]
CHAT = "/v1/chat/completions"
RESPONSE = {
    "start_anchor": "<|assistant|>",
    "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|end|>"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, with other names for the tokens of its calls: it is told to think, and thinks aloud."""
    model = tmp_path_factory.mktemp("model")
    for path in resolve_model("embedded").iterdir():
        if path.suffix == ".json" and path.name.startswith("tokenizer"):
            text = path.read_text(encoding="utf-8").replace("tool_call>", "think>")
            (model / path.name).write_text(text, encoding="utf-8")
        elif path.is_file():
            (model / path.name).symlink_to(path)
    _think_first(model / "tokenizer_config.json")
    policy = model / "policy.yaml"
    policy.write_text(
        "classes:\n  plain: {}\n  brief: {service_tiers: [flex], max_reasoning_tokens: 3}\n"
        "defaults: {price: {input: 1/1M, output: 2/1M, reasoning: 5/1M, currency: EUR}, limits: {cost: 9/month}}\n",
        encoding="utf-8",
    )
    return model


@pytest.fixture(scope="module")
def thinker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with _serving(model, tmp_path_factory.mktemp("server")) as server:
        yield server


def _serving(model: Path, folder: Path, *flags: str) -> AbstractContextManager[ServerProcess]:
    return running_server(folder, f"--model={model}", f"--policy={model / 'policy.yaml'}", "--threads=1", *flags)


def _think_first(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["chat_template"] = (
        "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
        "{% endfor %}<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    )
    path.write_text(json.dumps({**config, "response_template": RESPONSE}), encoding="utf-8")


@pytest.fixture
def chat(thinker: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key=thinker.key, max_retries=0, timeout=PATIENCE) as client:
        model = client.models.list().data[0].id
        fields = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 40}
        yield lambda **others: client.chat.completions.create(**(fields | others))


def test_reasoning_is_bounded_and_told_apart(chat: Any) -> None:
    reply = chat(extra_body={"thinking_token_budget": 4})
    message = reply.choices[0].message
    assert message.reasoning_content and message.content
    assert reply.usage.completion_tokens_details.reasoning_tokens == 5  # with the token that ends it
    hidden = chat(extra_body={"thinking_token_budget": 4, "include_reasoning": False}).choices[0].message
    assert hidden.content == message.content and not hasattr(hidden, "reasoning_content")
    deltas = [chunk.choices[0].delta for chunk in chat(stream=True, extra_body={"thinking_token_budget": 4})]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content


def test_a_response_tells_it_as_an_item(thinker: ServerProcess, chat: Any) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key=thinker.key, max_retries=0, timeout=PATIENCE) as client:
        model = client.models.list().data[0].id
        asked: Any = {"model": model, "input": ASK, "temperature": 0, "extra_body": {"thinking_token_budget": 4}}
        response = client.responses.create(max_output_tokens=40, **asked)
        events: Any = list(client.responses.create(max_output_tokens=40, stream=True, **asked))
        message = chat(extra_body={"thinking_token_budget": 4}).choices[0].message
        for one in (response, events[-1].response):
            reasoning, answer = one.output
            assert (reasoning.type, answer.type, one.output_text) == ("reasoning", "message", message.content)
            assert reasoning.type == "reasoning" and reasoning.content
            assert reasoning.content[0].text == message.reasoning_content
            assert one.usage and one.usage.output_tokens_details.reasoning_tokens == 5
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == message.reasoning_content
        told: Any = {"top_logprobs": 0, "max_output_tokens": 12, **asked}
        (_, whole), (*_, last) = client.responses.create(**told).output, client.responses.create(stream=True, **told)
        assert whole.type == "message" and whole.content[0].type == "output_text"
        texts = [one.token for one in whole.content[0].logprobs or ()]
        assert "".join(texts).rstrip() == whole.content[0].text, "not those of the reasoning"
        assert last.response.output[1].content[0].logprobs == whole.content[0].logprobs
        for effort, kinds in (("none", ["message"]), ("low", ["reasoning"])):
            quick: Any = client.responses.create(
                model=model, input=ASK, temperature=0, max_output_tokens=9, reasoning={"effort": effort}
            )
            assert [item.type for item in quick.output] == kinds


def test_anthropics_clients_turn_it_on(thinker: ServerProcess, chat: Any) -> None:
    model = thinker.get("/v1/models").json()["data"][0]["id"]
    asked: Any = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 40}
    thinking = {"type": "enabled", "budget_tokens": 4}
    told = chat(extra_body={"thinking_token_budget": 4}).choices[0].message
    thought, text = thinker.post("/v1/messages", **asked, thinking=thinking).json()["content"]
    assert thought == {"type": "thinking", "thinking": told.reasoning_content, "signature": ""}
    assert text == {"type": "text", "text": told.content}
    stream = thinker.post("/v1/messages", **asked, thinking=thinking, stream=True).text.split("\n\n")
    events = [json.loads(event.split("data: ", 1)[1]) for event in stream if event]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == told.reasoning_content
    assert "".join(delta.get("text", "") for delta in deltas) == told.content
    hidden = thinker.post("/v1/messages", **asked, thinking=thinking | {"display": "omitted"}).json()["content"]
    assert hidden == [text]
    for off in ({}, {"thinking": {"type": "disabled"}}):
        (quick,) = thinker.post("/v1/messages", **asked, **off).json()["content"]
        assert quick["type"] == "text" and quick["text"]
    turns = [*ASK, {"role": "assistant", "content": [thought, text]}, *ASK]
    assert thinker.post("/v1/messages", **(asked | {"messages": turns})).status_code == 200


def test_a_class_bounds_the_reasoning_of_its_requests(chat: Any) -> None:
    for extra, most in (({}, 3), ({"thinking_token_budget": 9}, 3), ({"thinking_token_budget": 1}, 1)):
        usage = chat(service_tier="flex", extra_body=extra).usage
        assert usage.completion_tokens_details.reasoning_tokens == most + 1


def test_reasoning_is_billed_at_a_price_of_its_own(thinker: ServerProcess) -> None:
    _hold_bill_to_answers(thinker)


@pytest.mark.nightly
def test_reasoning_billed_by_a_worker(model: Path, tmp_path: Path) -> None:
    with _serving(model, tmp_path, "--http-workers=1") as server:
        _hold_bill_to_answers(server)


def _hold_bill_to_answers(server: ServerProcess) -> None:
    """Every microunit of the bill follows from the usage that clients were told, and so does the budget's rest."""
    asked: Any = {"model": server.get("/v1/models").json()["data"][0]["id"], "messages": ASK, "temperature": 0}
    before = _billed(server)
    used = [server.post(CHAT, **asked, max_tokens=30, thinking_token_budget=4 + n).json()["usage"] for n in range(2)]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, {"stop": "5", "n": 2}):
        with server.stream(CHAT, **asked, **options, **more, max_tokens=20, thinking_token_budget=6) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        used.append(json.loads(events[-2])["usage"])
    given, output = (sum(one[name] for one in used) for name in ("prompt_tokens", "completion_tokens"))
    reasoning = sum(one["completion_tokens_details"]["reasoning_tokens"] for one in used)
    assert 0 < reasoning < output
    cost = given + 2 * (output - reasoning) + 5 * reasoning
    assert [now - was for now, was in zip(_billed(server), before, strict=True)] == [
        given,
        output,
        reasoning,
        cost,
        -cost,
    ]


def _billed(server: ServerProcess) -> list[int]:
    """Tokens of input, output and reasoning, their cost, and what is left of the budget, in millionths."""
    total, (budget,) = server.admin("usage")["total"], server.admin("budgets")["budgets"]
    tokens = [total[f"{name}_tokens"] for name in ("input", "output", "reasoning")]
    return [*tokens, int(Decimal(total["costs"].get("EUR", 0)) * 10**6), round(budget["left"] * 10**6)]


def test_without_a_bound_it_may_think_to_the_end(chat: Any) -> None:
    reply = chat()
    message, usage = reply.choices[0].message, reply.usage
    assert message.reasoning_content and message.content is None
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens
    (choice,) = chat(reasoning_effort="none").choices
    assert choice.message.content and not hasattr(choice.message, "reasoning_content")


def test_a_schema_holds_after_the_reasoning(chat: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    (choice,) = chat(response_format=form, extra_body={"thinking_token_budget": 3}).choices
    assert json.loads(choice.message.content)["a"] in (1, 2)
    assert choice.message.reasoning_content


@pytest.mark.parametrize(
    ("structured", "expected", "reasons"),
    [
        ({"choice": ["yes/no", "<|end|>"]}, r"yes/no|<\|end\|>", True),
        ({"regex": r"(a/b){2}\d"}, r"(a/b){2}\d", True),
        ({"json": {"enum": ["x"]}}, '"x"', True),
        ({"grammar": 'start: "<think>" /[ab]/'}, "<think>[ab]", False),
    ],
)
def test_the_content_after_the_reasoning_matches_the_grammar(
    chat: Any, structured: Any, expected: str, reasons: bool
) -> None:
    asked: Any = {"extra_body": {"structured_outputs": structured}, "max_tokens": 200, "seed": 1, "temperature": 1.5}
    (choice,) = chat(**asked).choices
    if choice.finish_reason == "stop":
        assert re.fullmatch(expected, choice.message.content)
        assert hasattr(choice.message, "reasoning_content") == reasons
    chunks = [chunk.choices[0].delta for chunk in chat(stream=True, **asked)]
    assert "".join(delta.content or "" for delta in chunks) == (choice.message.content or "")
    assert not reasons or choice.finish_reason == "stop" or choice.message.reasoning_content
