"""A GGUF file's vocabulary encodes as the tokenizer it was made of."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from backend.errors import ModelLoadError
from backend.gguf.reader import GgufFile
from backend.gguf.vocabulary import _PRETOKENIZERS, GgufVocabulary
from backend.text.token_bytes import byte_decoding
from tests.backend.gguf.files import MARKS, byte_letters, byte_level, gguf, save
from tests.backend.tiny_tokenizers import CORPUS, SPECIAL_TOKENS, byte_fallback_bpe

TEXTS = [
    *CORPUS[:5],
    "IT'S we'Re they'll I'd 'm",
    "12345678 ٣٤٥ x1y22z333",
    " \n\n  \t a  b\r\n\r\n",
    "cafe\u0301 Ångström e\u0301",
    "camelCase HTTPServer XMLÉcole path/to/file //\n/",
    "<|im_start|>user\nHi<|im_end|>\n<tool>x",
    "",
]


def vocabulary_of(tmp_path: Path, keys: dict[str, Any]) -> GgufVocabulary:
    with GgufFile(save(tmp_path / "a.gguf", gguf(keys, {}))) as file:
        return GgufVocabulary(file)


def built(tmp_path: Path, keys: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(vocabulary_of(tmp_path, keys).tokenizer()))


def trained(pre: str) -> tokenizers.Tokenizer:
    """A tokenizer whose words are cut as transformers cuts them for such a file."""
    core = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3", "tekken")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    steps: list[Any] = [byte_level]
    if pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif pre != "gpt-2":
        split = tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre])
        steps = [pre_tokenizers.Split(split, behavior="isolated"), byte_level]
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "deepseek-r1-qwen"):
        core.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=byte_letters(), special_tokens=MARKS, show_progress=False
    )
    core.train_from_iterator([*CORPUS, *TEXTS] * 2, trainer)
    return core


@pytest.mark.parametrize("pre", _PRETOKENIZERS)
def test_a_byte_level_vocabulary_encodes_and_decodes_as_its_tokenizer(pre: str, tmp_path: Path) -> None:
    core = trained(pre)
    said = json.loads(core.to_str())["model"]
    tokens = sorted(said["vocab"], key=said["vocab"].get)
    keys = byte_level([" ".join(merge) for merge in said["merges"]], tokens=tokens, pre=pre, add_bos_token=False)
    keys["tokenizer.ggml.token_type"] = [3] * len(MARKS) + [1] * (len(tokens) - len(MARKS))
    found = built(tmp_path, keys)
    for text in TEXTS:
        ids = core.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == core.decode(ids)


def sentencepiece(**keys: Any) -> dict[str, Any]:
    core = byte_fallback_bpe()
    tokens = sorted(core.get_vocab(), key=core.get_vocab().get)
    kinds = [
        2 if token == "<unk>" else 3 if token in SPECIAL_TOKENS else 6 if token[:3] == "<0x" else 1 for token in tokens
    ]
    ranks = ["▁t", "th", "he", "▁the"]
    scores = [-float(ranks.index(token)) if token in ranks else -100.0 for token in tokens]
    said = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "unknown_token_id": 0}
    said |= {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in (said | keys).items() if value is not None}


def test_a_sentencepiece_vocabulary_encodes_and_decodes_as_its_tokenizer(tmp_path: Path) -> None:
    core, found = byte_fallback_bpe(), built(tmp_path, sentencepiece())
    decoding = byte_decoding(found)
    assert decoding is not None and decoding.strip_left == 1
    for text in [*TEXTS, "the thing is the theme", "  two  spaces"]:
        assert found.encode(text).ids == core.encode(text).ids, text
        assert found.decode(found.encode(text).ids) == core.decode(core.encode(text).ids)


def test_merges_follow_scores_as_in_transformers(tmp_path: Path) -> None:
    keys = sentencepiece()
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    names = [token for token, kind in zip(tokens, keys["tokenizer.ggml.token_type"], strict=True) if kind != 1]
    merges = vocabulary_of(tmp_path, keys).tokenizer()["model"]["merges"]
    best: list[tuple[str, str]] = generate_merges(ids, dict(zip(tokens, scores, strict=True)), names)
    assert sorted(merges) == sorted(map(list, best))
    assert ["".join(merge) for merge in merges] == ["".join(merge) for merge in best]


def test_without_a_space_before_a_text_none_is_taken_off(tmp_path: Path) -> None:
    found = built(tmp_path, sentencepiece(add_space_prefix=False))
    assert found.encode("the").tokens == ["th", "e"] or found.encode("the").tokens == ["t", "he"]
    assert found.decode(found.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (byte_level([]), ["A"]),
        (byte_level([], add_bos_token=True), ["<|im_start|>", "A"]),
        (byte_level([], pre="llama-bpe"), ["<|im_start|>", "A"]),
        (byte_level([], pre="llama-bpe", add_eos_token=True), ["<|im_start|>", "A", "<|im_end|>"]),
        (sentencepiece(add_bos_token=None), ["<s>", "▁", "<0x41>"]),
    ],
)
def test_a_plain_prompt_has_the_special_tokens_that_its_metadata_names(
    keys: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    assert built(tmp_path, keys).encode("A").tokens == expected


def test_special_tokens_and_ends(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path, byte_level([], eot_token_id=3, padding_token_id=0))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert vocabulary.special_tokens() == named
    assert vocabulary.token_ids() == {"bos_token_id": 1, "eos_token_id": [0, 2, 3]}, "also of a name that ends texts"
    added = vocabulary.tokenizer()["added_tokens"]
    assert [(one["content"], one["special"]) for one in added] == [(mark, mark != "<tool>") for mark in MARKS]


LONG = [f"{number:01024}" for number in range(600)]
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": (byte_level([], tokens=None), "tokens: an array of str"),
    "an empty array of tokens": (byte_level([], tokens=[]), "tokens: there are none"),
    "tokens of another type": (byte_level([], tokens=[1, 2]), "tokens: an array of str"),
    "a token twice": (byte_level([], tokens=["a", "a"]), "tokens: a token is there twice"),
    "a token without end": (byte_level([], tokens=["a", "b" * 2000]), "tokens: one has over 1,024"),
    "no types": (byte_level([], token_type=None), "token_type: an array of int"),
    "fewer types": (byte_level([], token_type=[1]), "token_type: a type from 1 to 6 of each"),
    "a type that is none": (byte_level([], tokens=["a"], token_type=[9]), "token_type: a type from 1 to 6"),
    "another model": (byte_level([], model="bert"), r"tokenizer\.ggml\.model is 'bert'; gpt2 or llama"),
    "no pretokenizer": (byte_level(["a b"], pre=None), r"tokenizer\.ggml\.pre is missing; one of gpt-2"),
    "a pretokenizer that is none": (byte_level(["a b"], pre="mpt"), r"tokenizer\.ggml\.pre is 'mpt'; one of"),
    "a merge of one": (byte_level([], merges=["ab"]), r"merges\[0\]: 'ab' are no two tokens"),
    "a merge of what is no token": (byte_level([], merges=["a b"]), r"merges\[0\]: 'a b' are no two"),
    "an end that is no token": (byte_level([], eos_token_id=1000), r"eos_token_id is 1000; one of the 260 tokens"),
    "a flag that is none": (byte_level([], add_bos_token="yes"), r"add_bos_token is 'yes'; true or false"),
    "fewer scores": (sentencepiece(scores=[1.0]), "scores: a score of each"),
    "long tokens, thousands of them": (
        sentencepiece(tokens=[*LONG], token_type=[1] * len(LONG), scores=[0.0] * len(LONG)), "tokens: they are too long"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_vocabulary_is_refused(fault: str, tmp_path: Path) -> None:
    keys, message = FAULTS[fault]
    with pytest.raises(ModelLoadError, match=message) as refused:
        made(vocabulary_of(tmp_path, keys))
    assert str(tmp_path / "a.gguf") in str(refused.value)


def made(vocabulary: GgufVocabulary) -> None:
    vocabulary.token_ids()
    vocabulary.tokenizer()
