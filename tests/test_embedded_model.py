"""The embedded model as it lies in the package: small, complete and consistent."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

import backend

FOLDER = Path(backend.__file__).parent / "embedded"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def parsed(name: str) -> dict[str, object]:
    value = json.loads((FOLDER / name).read_text())
    assert isinstance(value, dict)
    return value


def shapes() -> dict[str, tuple[int, ...]]:
    with safe_open(FOLDER / "model.safetensors", framework="np") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - it is no dict


def rendered(messages: list[dict[str, object]], *, add_generation_prompt: bool = True) -> str:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    template = ImmutableSandboxedEnvironment().from_string(str(parsed("tokenizer_config.json")["chat_template"]))
    return template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        raise_exception=raise_exception,
    )


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


def test_generation_ends_with_the_token_that_ends_a_message() -> None:
    assert parsed("generation_config.json")["eos_token_id"] == TOKENIZER.token_to_id("<|end|>")


@pytest.mark.parametrize("name", ["README.md", "tokenizer_config.json"])
def test_the_model_card_and_the_tokenizer_settings_are_there(name: str) -> None:
    assert (FOLDER / name).read_text().strip()


@given(st.text())
def test_any_text_encodes_and_decodes_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens() -> None:
    assert TOKENIZER.encode("1234567890", add_special_tokens=False).tokens == list("1234567890")


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
    with pytest.raises(TemplateError, match="not narrator"):
        rendered([{"role": "narrator", "content": "Hi"}])
