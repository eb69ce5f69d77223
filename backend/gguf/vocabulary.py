"""A GGUF file's vocabulary in the form of the tokenizers library: tokenizer.json, and the special tokens beside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backend.errors import ModelLoadError
from backend.gguf.reader import GgufFile
from backend.json_file import JsonFile

MAX_TOKEN_CHARS = 2**10  # the longest are runs of a hundred spaces
MAX_PART_CHARS = 2**29  # of the parts into which all tokens can be cut: seconds. 256,000 tokens of words have 2**24
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # ggml's types of tokens
_KINDS = 6
_ENDS = {  # control tokens that end an answer though no key may name them, as in llama.cpp
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>", "[EOS]",
}  # fmt: skip
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, slots=True)
class _Pretokenizer:
    """The rules that cut a text into words, before merges. A pattern of None: GPT-2's rule."""

    pattern: str | None = None
    splits_digits: bool = False
    is_composed: bool = False  # text is first composed to NFC
    ignores_merges: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # where the metadata does not tell


_LLAMA3 = _Pretokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignores_merges=True, adds_bos=True)
_QWEN2 = _Pretokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", is_composed=True)
_TEKKEN = _Pretokenizer(
    rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignores_merges=True,
    adds_bos=True,
)
_PRETOKENIZERS = {
    "gpt-2": _Pretokenizer(),
    "smollm": _Pretokenizer(splits_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


class GgufVocabulary:
    """The tokens of a file. Raises `ModelLoadError` naming the file and the field."""

    def __init__(self, file: GgufFile) -> None:
        self._json = JsonFile(file.path, file.metadata)
        self._tokens: list[str] = self._array("tokens", str)
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if not self._tokens:
            raise self._wrong("tokens", "there are none")
        if len(self._ids) < len(self._tokens):
            raise self._wrong("tokens", "a token is there twice")
        if max(map(len, self._tokens), default=0) > MAX_TOKEN_CHARS:
            raise self._wrong("tokens", f"one has over {MAX_TOKEN_CHARS:,} characters")
        self._kinds: list[int] = self._array("token_type", int)
        if len(self._kinds) != len(self._tokens) or not all(1 <= kind <= _KINDS for kind in self._kinds):
            raise self._wrong("token_type", f"a type from 1 to {_KINDS} of each token is expected")

    def tokenizer(self) -> dict[str, Any]:
        """Return the content of tokenizer.json."""
        match self._value("model"):
            case "gpt2":
                model = self._byte_level()
            case "llama":
                model = self._sentencepiece()
            case _:
                raise self._json.wrong("tokenizer.ggml.model", "gpt2 or llama is read")
        return {"version": "1.0", "added_tokens": [*self._added()], **model}

    def special_tokens(self) -> dict[str, str]:
        """Return the names that tokenizer_config.json gives to special tokens."""
        ids = {name: self._token_id(name) for name in ("bos", "eos", "unknown", "padding")}
        named = {"unknown": "unk", "padding": "pad"}
        return {
            f"{named.get(name, name)}_token": self._tokens[index] for name, index in ids.items() if index is not None
        }

    def token_ids(self) -> dict[str, Any]:
        """Return the ids that config.json names: the beginning token, and the tokens that end an answer."""
        named = (self._token_id(name) for name in ("eos", "eot", "eom"))
        ends = {index for index in named if index is not None}
        ends |= {self._ids[end] for end in _ENDS if self._kind_of(end) == _CONTROL}
        return {"bos_token_id": self._token_id("bos"), "eos_token_id": sorted(ends)}

    def _kind_of(self, token: str) -> int | None:
        return self._kinds[self._ids[token]] if token in self._ids else None

    def _byte_level(self) -> dict[str, Any]:
        name = self._value("pre")
        way = _PRETOKENIZERS.get(name) if isinstance(name, str) else None
        if way is None:
            raise self._json.wrong("tokenizer.ggml.pre", f"one of {', '.join(_PRETOKENIZERS)} is read")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps: list[dict[str, Any]] = []
        if way.splits_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if way.pattern is not None:
            split = {"type": "Split", "pattern": {"Regex": way.pattern}, "behavior": "Isolated", "invert": False}
            steps.append(split)
        steps.append({**byte_level, "use_regex": way.pattern is None})
        return {
            "normalizer": {"type": "NFC"} if way.is_composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": self._post_processor(way.adds_bos) or {**byte_level, "use_regex": False},
            "decoder": {**byte_level, "use_regex": True},
            "model": self._bpe([*self._stored_merges()], ignore_merges=way.ignores_merges),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        prepends = self._flag("add_space_prefix", True)
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepends else []
        decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
        prepend = [{"type": "Prepend", "prepend": "▁"}] if prepends else []
        unknown = self._token_id("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, space]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(True),
            "decoder": {"type": "Sequence", "decoders": [*decoders, {"type": "Fuse"}, *strip]},
            "model": self._bpe(
                self._merges_by_score(),
                byte_fallback=True,
                fuse_unk=True,
                unk_token=None if unknown is None else self._tokens[unknown],
            ),
        }

    def _bpe(self, merges: list[list[str]], **how: Any) -> dict[str, Any]:
        return {"type": "BPE", "vocab": self._ids, "merges": merges, **how}

    def _stored_merges(self) -> Iterator[list[str]]:
        for index, merge in enumerate(self._array("merges", str)):
            middle = merge.find(" ", 1)
            left, right = merge[:middle], merge[middle + 1 :]
            if middle < 0 or not {left, right, left + right} <= self._ids.keys():
                raise self._wrong(f"merges[{index}]", f"{merge[:100]!r} are no two tokens that are a third together")
            yield [left, right]

    def _merges_by_score(self) -> list[list[str]]:
        """Return all pairs of tokens that are a third together, whose score decides which is merged first."""
        scores = self._array("scores", float)
        if len(scores) != len(self._tokens):
            raise self._wrong("scores", "a score of each token is expected")
        if sum([len(token) ** 2 for token in self._tokens]) > MAX_PART_CHARS:
            raise self._wrong("tokens", "they are too long, all in all, to find out which are merged")
        pairs = [
            (-scores[index], index, self._ids[token[:cut]], self._ids[token[cut:]])
            for index, token in enumerate(self._tokens)
            if self._kinds[index] == _NORMAL
            for cut in range(1, len(token))
            if token[:cut] in self._ids and token[cut:] in self._ids
        ]
        return [[self._tokens[left], self._tokens[right]] for _, _, left, right in sorted(pairs)]

    def _added(self) -> Iterator[dict[str, Any]]:
        """Yield the tokens that are found in a text before all others; tokens that a text may show are not special."""
        for index, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True)):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
                how = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                yield {"id": index, "content": token, **how, "special": kind != _USER_DEFINED}

    def _post_processor(self, adds_bos: bool) -> dict[str, Any] | None:
        """Return the step that adds the tokens around a plain prompt; None if there are none."""
        bos = self._token_id("bos") if self._flag("add_bos_token", adds_bos) else None
        eos = self._token_id("eos") if self._flag("add_eos_token", False) else None
        if bos is None and eos is None:
            return None
        before, behind = ([] if index is None else [self._tokens[index]] for index in (bos, eos))

        def around(name: str, type_id: int) -> list[dict[str, Any]]:
            special = [
                [{"SpecialToken": {"id": token, "type_id": type_id}} for token in some] for some in (before, behind)
            ]
            return [*special[0], {"Sequence": {"id": name, "type_id": type_id}}, *special[1]]

        tokens = {token: {"id": token, "ids": [self._ids[token]], "tokens": [token]} for token in before + behind}
        single, second = around("A", 0), around("B", 1)
        return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": tokens}

    def _value(self, name: str) -> Any:
        return self._json.get(f"tokenizer.ggml.{name}")

    def _wrong(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._json.path}: tokenizer.ggml.{name}: {what}")

    def _flag(self, name: str, default: bool) -> bool:
        return self._json.flag(f"tokenizer.ggml.{name}", default)

    def _array(self, name: str, kind: type) -> list[Any]:
        value = self._value(name)
        if not isinstance(value, list) or not all(type(one) is kind for one in value):
            raise self._wrong(name, f"an array of {kind.__name__} is expected")
        return value

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if self._json.get(key) is None:
            return None
        index = self._json.integer(key, minimum=0)
        if index >= len(self._tokens):
            raise self._json.wrong(key, f"one of the {len(self._tokens):,} tokens is expected")
        return index
