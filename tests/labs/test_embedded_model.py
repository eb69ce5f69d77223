"""The embedded model as it lies in the package: small, complete and consistent."""

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

import backend
from backend.errors import InvalidRequest
from backend.text.chat_template import ChatTemplate
from backend.text.response_templates.template import ResponseTemplate
from labs.benchmarks.tool_skill.tools import Call, Parameter, Tool
from labs.benchmarks.tool_skill.turns import ToolTurn, fresh_tool_turns
from tests.backend.text.response_templates.families import Message
from tests.backend.text.response_templates.families import parsed as parsed_answer

FOLDER = Path(backend.__file__).parent / "embedded"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def parsed(name: str) -> dict[str, object]:
    value = json.loads((FOLDER / name).read_text())
    assert isinstance(value, dict)
    return value


def shapes() -> dict[str, tuple[int, ...]]:
    with safe_open(FOLDER / "model.safetensors", framework="np") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - it is no dict


CHAT_TEMPLATE = ChatTemplate(
    str(parsed("tokenizer_config.json")["chat_template"]), {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
)


def rendered(messages: list[dict[str, object]], *, add_generation_prompt: bool = True, **variables: object) -> str:
    return CHAT_TEMPLATE.render(cast(Any, messages), add_generation_prompt, **variables)


def test_all_files_together_are_at_most_12_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000


def test_the_model_has_at_most_5_million_parameters() -> None:
    assert sum(map(math.prod, shapes().values())) <= 5_000_000


def test_config_weights_and_tokenizer_agree() -> None:
    config = parsed("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    vocab_size = TOKENIZER.get_vocab_size()
    assert config["vocab_size"] == vocab_size
    assert shapes()["model.embed_tokens.weight"] == (vocab_size, config["hidden_size"])


@pytest.mark.parametrize("name", ["README.md", "tokenizer_config.json"])
def test_the_model_card_and_the_tokenizer_settings_are_there(name: str) -> None:
    assert (FOLDER / name).read_text().strip()


@given(st.text())
def test_any_text_encodes_and_decodes_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_renders_a_system_prompt_and_turns() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count from 1 to 2."},
        {"role": "assistant", "content": "1, 2"},
        {"role": "user", "content": [{"type": "text", "text": "Count from 3 to 4."}]},
    ]
    assert rendered(messages) == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Count from 1 to 2.<|end|><|assistant|>1, 2<|end|>"
        "<|user|>Count from 3 to 4.<|end|><|assistant|>"
    )


def test_the_chat_template_leaves_the_answer_out_when_not_asked_for_it() -> None:
    assert rendered([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == "<|begin|><|user|>Hi<|end|>"


def test_the_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(InvalidRequest, match="not narrator"):
        rendered([{"role": "narrator", "content": "Hi"}])


WEATHER = Tool("get_weather", (Parameter("city", "string"), Parameter("unit", ("celsius", "fahrenheit"))), "weather")
LINE = '{"name": "get_weather", "parameters": {"city": "string", "unit": ["celsius", "fahrenheit"]}}'


def test_tokens_of_calls_are_text_that_clients_may_read_and_one_token_each() -> None:
    assert TOKENIZER.encode("<tool_call></tool_call>", add_special_tokens=False).tokens == [
        "<tool_call>",
        "</tool_call>",
    ]
    call = Call("get_weather", {"city": "Rome"}).text()
    assert TOKENIZER.decode(TOKENIZER.encode(call).ids, skip_special_tokens=True) == call


def test_the_chat_template_lists_tools_before_the_conversation_or_after_its_system_prompt() -> None:
    ask: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
    tools = [WEATHER.schema(), Tool("now", (), "now").schema()]
    lines = LINE + '\n{"name": "now", "parameters": {}}'
    after = "<|end|><|user|>Hi<|end|><|assistant|>"
    assert rendered(ask, tools=tools) == f"<|begin|><|system|>{lines}{after}"
    brief: list[dict[str, object]] = [{"role": "developer", "content": "Be brief."}]
    assert rendered(brief + ask, tools=tools) == f"<|begin|><|system|>Be brief.\n{lines}{after}"
    assert rendered(ask, tools=[]) == "<|begin|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ({"name": "f"}, '{"name": "f", "parameters": {}}'),
        ({"name": "f", "parameters": {"type": "object"}}, '{"name": "f", "parameters": {}}'),
        (
            {"name": "f", "parameters": {"properties": {"items": {"type": ["string", "null"]}, "b": True, "c": {}}}},
            '{"name": "f", "parameters": {"items": ["string", "null"], "b": "any", "c": "any"}}',
        ),
    ],
)
def test_the_chat_template_lists_tools_of_any_shape(function: dict[str, object], line: str) -> None:
    prompt = rendered([{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": function}])
    assert prompt == f"<|begin|><|system|>{line}<|end|><|user|>Hi<|end|><|assistant|>"


def test_the_chat_template_renders_calls_as_the_model_writes_them_and_their_results() -> None:
    call = Call("get_weather", {"city": "Zürich"})
    as_text = {"function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    for sent in (call.message(), as_text):
        message: dict[str, object] = {"role": "assistant", "content": "Wait.", "tool_calls": [sent, call.message()]}
        assert rendered([message, {"role": "tool", "content": "18 degrees"}]) == (
            f"<|begin|><|assistant|>Wait.\n{call.text()}\n{call.text()}<|end|><|tool|>18 degrees<|end|><|assistant|>"
        )


def prompt_of(tools: tuple[Tool, ...], turn: ToolTurn) -> str:
    """The text that training has before an answer to the results of the calls."""
    lines = "\n".join(tool.line() for tool in tools)
    results = "".join(f"<|tool|>{result}<|end|>" for result in turn.results)
    return (
        f"<|begin|><|system|>{lines}<|end|><|user|>{turn.prompt}<|end|>"
        f"<|assistant|>{turn.first_text}<|end|>{results}<|assistant|>"
    )


def test_the_chat_template_renders_what_training_has() -> None:
    for tools, turn in fresh_tool_turns(50, seed=1, skill="tool_parallel"):
        messages = turn.messages(with_results=True)
        assert rendered(messages, tools=[tool.schema() for tool in tools]) == prompt_of(tools, turn)


def test_our_parser_reads_what_the_model_writes_by_the_response_template() -> None:
    template = ResponseTemplate(cast(Any, parsed("tokenizer_config.json")["response_template"]))
    calls = (Call("get_weather", {"city": "Rome"}), Call("add", {"a": 1, "b": 2}))
    text = "Wait.\n" + "\n".join(call.text() for call in calls)
    expected = Message("Wait.", calls=(("get_weather", '{"city": "Rome"}'), ("add", '{"a": 1, "b": 2}')))
    assert parsed_answer(template, [text]) == parsed_answer(template, list(text)) == expected


def test_transformers_parses_what_the_model_writes_by_the_response_template() -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers 5.13 and later")
    template = parsed("tokenizer_config.json")["response_template"]
    calls = (Call("get_weather", {"city": "Rome"}), Call("add", {"a": 1, "b": 2}))
    text = "\n".join(call.text() for call in calls)
    prefix = "<|begin|><|user|>Hi<|end|><|assistant|>"
    for content in ("", "Wait.\n"):
        message = chat_parsing.parse_response(content + text + "<|end|>", template, prefix=prefix)
        assert message.pop("content", "") == content.strip()
        assert message == {"role": "assistant", "tool_calls": [call.message() for call in calls]}
    assert chat_parsing.parse_response("1, 2<|end|>", template, prefix=prefix) == {
        "role": "assistant",
        "content": "1, 2",
    }
