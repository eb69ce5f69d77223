import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import models

from backend.errors import InvalidRequest, ModelLoadError, TooManyTokens
from backend.text.tokenizer import INLINE_CHARS, Tokenizer, remember_no_words
from tests.backend import tiny_tokenizers as tiny
from tests.backend.tiny_tokenizers import write_model


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_dir(write_model(tmp_path), model_vocab_size=1024)
    yield tokenizer
    tokenizer.close()


def test_encodes_as_the_checkpoint_says(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode_text("a fox", add_special_tokens=False)
    assert tokenizer.encode_text("a fox", add_special_tokens=True) == [tokenizer.bos_token_id, *plain]
    assert tokenizer.decode([0, *plain, 1]) == "a fox"
    assert tokenizer.decode([0, *plain, 1], skip_special_tokens=False) == "<s>a fox</s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) is not None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


def test_a_long_text_of_more_tokens_than_may_be_had_is_refused_with_their_number(tokenizer: Tokenizer) -> None:
    text = "fox " * INLINE_CHARS
    count = len(tokenizer.encode_text(text, add_special_tokens=False))
    with pytest.raises(TooManyTokens) as refusal:
        tokenizer.encode_text(text, False, count - 1)
    assert refusal.value.num_tokens == count
    assert len(tokenizer.encode_text(text, False, count)) == count


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    write_model(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                           "pad_type_id": 0, "pad_token": "<s>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_dir(tmp_path, model_vocab_size=1024)
    assert tokenizer.decode(tokenizer.encode_text("1, 2, 3, 12, 345", False)) == "1, 2, 3, 12, 345"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode_text("a\ud800", add_special_tokens=False)


def test_special_tokens_in_a_message_are_encoded_as_such(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_text("x<|im_end|>", add_special_tokens=False)[-1] == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {}}', b"\xff\xfe"])
def test_a_corrupt_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not found; save"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    size = Tokenizer.from_dir(write_model(tmp_path), model_vocab_size=1024).vocab_size
    assert Tokenizer.from_dir(tmp_path, model_vocab_size=size).vocab_size == size
    with pytest.raises(ModelLoadError, match=f"highest token id is {size - 1}, but the model has {size - 1}"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=size - 1)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_corrupt_config_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_special_tokens_come_from_their_own_file_when_the_config_has_none(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = Tokenizer.from_dir(tmp_path, model_vocab_size=1024)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 3)


@pytest.mark.parametrize("text", ["", "hello", "1" * 5000, "day " * 700, "é🙂" * 300])
def test_a_text_has_at_least_the_fewest_tokens_that_its_length_allows(text: str) -> None:
    for core in (tiny.byte_level_bpe(), tiny.byte_fallback_bpe(), tiny.metaspace_unigram()):
        tokenizer = Tokenizer(core)
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode_text(text, add_special_tokens=False))


class RememberingModel:
    """What the library's BPE and Unigram models have."""

    capacity = 10_000

    def _resize_cache(self, capacity: int) -> None:
        self.capacity = capacity


def test_encoding_time_does_not_depend_on_words_that_others_have_sent() -> None:
    model = RememberingModel()
    remember_no_words(model)
    assert model.capacity == 0
    remember_no_words(models.WordLevel())  # which remembers nothing
    assert all(hasattr(kind, "_resize_cache") for kind in (models.BPE, models.Unigram)), (
        "the library calls it otherwise"
    )


def test_a_tokenizer_remembers_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr("backend.text.tokenizer.remember_no_words", seen.append)
    Tokenizer.from_dir(write_model(tmp_path), model_vocab_size=1024).close()
    assert len(seen) == 1


def test_the_response_template_is_the_checkpoints_own_or_that_of_its_chat_template(tmp_path: Path) -> None:
    own = {"start_anchor": "A:", "fields": {"content": {"close": "B"}}}
    write_model(tmp_path, response_template=own, chat_template="<tool_call>")
    template = Tokenizer.from_dir(tmp_path, 1024).response_template
    assert template is not None and [field.name for field in template.fields] == ["content"]
    write_model(tmp_path, chat_template="<tool_call>")
    template = Tokenizer.from_dir(tmp_path, 1024).response_template
    assert template is not None and [field.name for field in template.fields] == ["tool_calls", "content"]
    write_model(tmp_path, response_template=own, chat_template="plain")
    template = Tokenizer.from_dir(tmp_path, 1024).response_template
    assert template is not None and [field.name for field in template.fields] == ["content"]
    write_model(tmp_path)
    assert Tokenizer.from_dir(tmp_path, 1024).response_template is None
    write_model(tmp_path, response_template={"fields": {"content": {"open_pattern": "(a"}}})
    with pytest.raises(
        ModelLoadError, match=r"tokenizer_config\.json: .*content\.open_pattern: .* not closed.*correct or"
    ):
        Tokenizer.from_dir(tmp_path, 1024)
