"""Small tokenizers of the kinds that real checkpoints have, trained in the test on a few words of many scripts."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog; counting 1, 2, 3, 12, 345.",
    "Ça va? Où est la bibliothèque? naïve café, Straße, señor",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "emoji 😀 👩‍👩‍👧 🇫🇷 e\u0301 combining \u0928\u093f",
    "    indented\n\n\tcode(x) == y  # comment",
] * 4
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_bpe() -> tokenizers.Tokenizer:
    """As in Llama 3 and Qwen."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "plain added", "Ünïcode"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@cache
def normalising_bpe() -> tokenizers.Tokenizer:
    """As Qwen's: what is encoded is composed (NFC) before."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_bpe().to_str())
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """As transformers makes of the SentencePiece models of Llama 2 and Mistral."""
    return _byte_fallback([decoders.Strip(" ", 1, 0)])


@cache
def byte_fallback_bpe_unstripped() -> tokenizers.Tokenizer:
    """As in Gemma: the text keeps its first space."""
    return _byte_fallback([])


def _byte_fallback(strip: list[decoders.Decoder]) -> tokenizers.Tokenizer:
    specials = ["<unk>", *SPECIAL_TOKENS]
    pieces = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "é", "日", "▁the", "th", "he", "▁t", "ing"]
    merges = [("▁", "t"), ("t", "h"), ("h", "e"), ("▁t", "he")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


@cache
def metaspace_unigram() -> tokenizers.Tokenizer:
    """A decoder that looks at neighbours: the first token's space is dropped."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL_TOKENS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_model(directory: Path, **config: Any) -> Path:
    byte_level_bpe().save(str(directory / "tokenizer.json"))
    defaults = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return directory
