"""A tokenizer turns text into token ids and back, and messages into prompt text, from a model directory."""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from sys import maxsize
from typing import Any, Literal

import tokenizers

from backend.errors import InvalidRequest, ModelLoadError, TooManyTokens
from backend.json_file import JsonFile
from backend.text.chat_template import ChatTemplate, Message
from backend.text.control_tokens import ControlTokens, PartedText
from backend.text.response_templates.builtin import builtin_template
from backend.text.response_templates.template import ResponseTemplate, ResponseTemplateError
from backend.text.token_bytes import TokenBytes, byte_decoding

INLINE_CHARS = 2048  # encoded on the calling thread in well under a millisecond; longer texts go to the pool
_ENCODE_THREADS = 2
_NORMALIZED_CHARS = 4  # the most characters of which a normalizer makes one (NFC, NFKC)
_PARTS_PER_CALL = 256  # parts of a `PartedText` that one call encodes
_BEFORE = "\n"  # precedes a part, so that no tokenizer takes the part for the beginning of a text
_FILL_IN_THE_MIDDLE = [  # tokens before the prefix, before the suffix, and before the answer
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
]
ChatControlTokens = Literal["text", "parsed"]
DEFAULT_TOOLS = Path(__file__).with_name("default_tools.jinja").read_text(encoding="utf-8")
"""A template put before a chat template that has no place for tools: it describes tools, calls and results in messages.
"""
_SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class Tokenizer:
    """A checkpoint's tokenizer and chat template. It is safe to use from several threads.

    `encode` and `decode` block the caller: long texts belong on the threads of `pool`. Among the library's calls only
    `encode_batch_fast` releases the interpreter lock; it computes no offsets and is a quarter cheaper than the
    library's `encode` even for one short text.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        response_template: ResponseTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`special_tokens` maps names such as eos_token to their text; `config` is the checkpoint's own."""
        self.response_template = response_template  # None: the text of an answer is its content
        core.no_truncation()
        core.no_padding()
        remember_no_words(core.model)
        self._core = core
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        template = {} if chat_template is None else {"chat_template": chat_template.source}
        told = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {}), **self._special_tokens, **template}
        self.info = json.dumps(told, ensure_ascii=False).encode("utf-8", "replace")  # the configuration, as JSON
        self.vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # highest id + 1
        self._longest_token = max(map(len, core.get_vocab(with_added_tokens=True)), default=1)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.sep_token_id = self._special_id("sep_token")
        self.fill_in_the_middle = self._fill_in_the_middle()
        decoding = byte_decoding(core)
        self.strip_left = decoding.strip_left if decoding else 0  # spaces that decoding drops before a text begins
        added = core.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        delimiters = (
            frozenset(filter(response_template.needs, self.special_tokens)) if response_template else frozenset()
        )
        self._token_bytes = decoding and [TokenBytes(core, decoding.piece_bytes, skip) for skip in (False, True)]
        self._message_bytes = TokenBytes(core, decoding.piece_bytes, True, delimiters) if decoding else None
        self.pool = ThreadPoolExecutor(_ENCODE_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def from_dir(
        cls, model_dir: Path, model_vocab_size: int, chat_control_tokens: ChatControlTokens = "text"
    ) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja, all but the
        first optional. Raises `ModelLoadError` naming the file, also when it holds ids that the model has no row for.

        `chat_control_tokens` says how control tokens that messages spell are read.
        """
        path = model_dir / "tokenizer.json"
        core, config = _read_core(path), _optional(model_dir / "tokenizer_config.json")
        special_tokens = _special_tokens(config, _optional(model_dir / "special_tokens_map.json"))
        template, found = None, _read_chat_template(model_dir, config)
        if found:
            source, origin = found
            template = _chat_template(source, origin, special_tokens, core, chat_control_tokens)
            if "tools" not in template.variables and config.get("response_template") is None:
                source = DEFAULT_TOOLS + source
                found = source, origin
                template = _chat_template(source, origin, special_tokens, core, chat_control_tokens)
        tokenizer = cls(core, special_tokens, template, _read_response_template(config, found), config.values)
        if tokenizer.vocab_size > model_vocab_size:
            raise ModelLoadError(
                f"{path}: the highest token id is {tokenizer.vocab_size - 1}, but the model has {model_vocab_size} "
                "embeddings; use the tokenizer the model was trained with, or resize its embeddings"
            )
        return tokenizer

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text, without encoding it: encoding megabytes takes seconds."""
        return len(text) // self.most_chars(1)

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return a beginning of a text: twice the characters of `num_tokens` of the longest tokens, cut at a space if
        there is one in the second half, so that the cut changes none of the first tokens.
        """
        fewest, most = self.most_chars(num_tokens + 1), self.most_chars(2 * (num_tokens + 1))
        if len(text) <= most:
            return text
        end = text.rfind(" ", fewest, most)
        return text[: most if end < 0 else end]

    def most_chars(self, num_tokens: int) -> int:
        """Return the most characters of a text that has this many tokens."""
        return num_tokens * self._longest_token * (1 if self._core.normalizer is None else _NORMALIZED_CHARS)

    def encode_text(self, text: str, add_special_tokens: bool, most: int = maxsize) -> list[int]:
        """Return the token ids of a text. `add_special_tokens` adds the checkpoint's start of a plain prompt (BOS);
        rendered chats have it already.

        Raises `TooManyTokens` for a long text that has more than `most`: a list of them would hold the interpreter
        lock.
        """
        if isinstance(text, PartedText):
            return self._encode_parts(text, add_special_tokens, most)
        try:
            (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as exc:  # only lone surrogates make a str unacceptable
            raise InvalidRequest("the text is not valid Unicode: it holds a lone surrogate", "prompt") from exc
        if len(encoding) > most:
            raise TooManyTokens(len(encoding), most)
        return encoding.ids

    def encode_inputs(self, inputs: Sequence[str | tuple[str, str]]) -> list[list[int]]:
        """Return the token ids of texts and of pairs of texts, with the checkpoint's tokens before, between and behind
        them. The interpreter lock is released meanwhile.
        """
        try:
            return [found.ids for found in self._core.encode_batch_fast(list(inputs), add_special_tokens=True)]
        except TypeError as exc:
            raise InvalidRequest("a text is not valid Unicode: it holds a lone surrogate", "documents") from exc

    @cached_property
    def num_closing(self) -> int:
        """The number of special tokens behind a text."""
        marks = self._core.encode("a").special_tokens_mask
        return next((n for n, mark in enumerate(reversed(marks)) if not mark), 0)

    def take_special_tokens_as_text(self) -> None:
        """Encode a text that spells special tokens like any other text, from now on."""
        self._core.encode_special_tokens = True

    def _encode_parts(self, text: PartedText, add_special_tokens: bool, most: int) -> list[int]:
        parts = text.parts()
        first = next(parts)
        ids, before = self.encode_text(first, False), self.encode_text(_BEFORE, False)
        behind = list[int]()
        if add_special_tokens:
            ids, behind = _around(ids, self.encode_text(first, True))
        while len(ids) <= most and (some := list(islice(parts, _PARTS_PER_CALL))):
            encodings = self._core.encode_batch_fast([_BEFORE + part for part in some], add_special_tokens=False)
            for part, encoding in zip(some, encodings, strict=True):
                begins_alike = encoding.ids[: len(before)] == before
                ids += encoding.ids[len(before) :] if begins_alike else self.encode_text(part, False)
        if len(ids) > most:
            raise TooManyTokens(len(ids), most, at_least=True)
        return ids + behind

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the whole text at once. Unknown ids are left out; bytes that form no character become U+FFFD."""
        return self._core.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it."""
        return self._core.id_to_token(token_id)

    def token_bytes(self, skip_special_tokens: bool, in_message: bool = False) -> TokenBytes | None:
        """Return the bytes of each token, or None where a token's text depends on its neighbours. `in_message`: special
        tokens that are delimiters of the response template are not skipped.
        """
        if in_message and skip_special_tokens:
            return self._message_bytes
        return self._token_bytes[skip_special_tokens] if self._token_bytes else None

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of conversations. Raises `InvalidRequest` if there is none."""
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or put a chat_template.jinja beside its weights",
                "messages",
            )
        return self._chat_template

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt text of a conversation; see `ChatTemplate.render`."""
        return self.chat_template.render(messages, add_generation_prompt, **variables)

    @property
    def has_default_tools(self) -> bool:
        return self._chat_template is not None and self._chat_template.source.startswith(DEFAULT_TOOLS)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def close(self) -> None:
        """End the encoding threads; texts still waiting are dropped."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _fill_in_the_middle(self) -> tuple[int, int, int] | None:
        """Return the ids of the tokens that mark the text before an answer, the text behind it and the answer itself;
        None if the checkpoint has none.
        """
        for names in _FILL_IN_THE_MIDDLE:
            before, behind, middle = (self._core.token_to_id(name) for name in names)
            if before is not None and behind is not None and middle is not None:
                return before, behind, middle
        return None

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._core.token_to_id(text)


def control_tokens(core: tokenizers.Tokenizer, chat_template: str) -> ControlTokens | None:
    """Return the tokens by which a model is told who speaks, thinks or calls: special tokens, and added tokens that are
    written in angle brackets or in the chat template. Other added tokens, such as runs of spaces, are texts like any
    other. None: there are no control tokens.
    """
    added = [
        token
        for token in core.get_added_tokens_decoder().values()
        if len(token.content) > 1 and not token.content.isspace()
    ]
    control = [
        token
        for token in added
        if token.special or re.fullmatch("<.*>", token.content) or token.content in chat_template
    ]
    is_normalized = core.normalizer is not None and any(token.normalized for token in control)
    normalize = core.normalizer.normalize_str if is_normalized else None
    return ControlTokens([token.content for token in control], normalize) if control else None


def _around(ids: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Return the part of `whole` before `ids`, with `ids`, and the part behind them."""
    ends = range(len(whole), len(ids) - 1, -1)
    end = next((end for end in ends if whole[end - len(ids) : end] == ids), len(whole))
    return whole[:end], whole[end:]


def remember_no_words(model: Any) -> None:
    """Have a model of the library remember no words that it has split, if it would.

    The texts of all tenants go through one tokenizer, and a remembered word takes less time. With the 10,000 words that
    the library keeps, /tokenize answered 62 made-up words 35 us of 0.49 ms sooner if another tenant had sent them (p =
    2e-8 in 70 pairs); without, p = 0.3. Prose takes up to 15 % longer.
    """
    if hasattr(model, "_resize_cache"):  # BPE and Unigram
        model._resize_cache(0)


def _read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelLoadError(
            f"{path}: not found; save the fast tokenizer beside the weights (transformers: tokenizer.save_pretrained)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception for unreadable files
        raise ModelLoadError(f"{path}: not a tokenizer of the tokenizers library: {exc}; download it again") from exc


def _read_chat_template(model_dir: Path, tokenizer_config: JsonFile) -> tuple[str, str] | None:
    """Return the template's source and the name of its file, or None.

    As in transformers, chat_template.jinja wins over tokenizer_config.json; among named templates, "default" is taken.
    """
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return _read_text(path), str(path)
    origin = str(tokenizer_config.path)
    match tokenizer_config.get("chat_template"):
        case None:
            return None
        case str(source):
            return source, origin
        case [*entries] if (default := _default_template(entries)) is not None:
            return default, origin
    raise tokenizer_config.wrong(
        "chat_template", 'a string, or a list of templates with one named "default", is expected'
    )


def _chat_template(
    source: str,
    origin: str,
    special_tokens: Mapping[str, str],
    core: tokenizers.Tokenizer,
    chat_control_tokens: ChatControlTokens,
) -> ChatTemplate:
    control = control_tokens(core, source) if chat_control_tokens == "text" else None
    return ChatTemplate(source, special_tokens, origin, control)


def _read_response_template(
    tokenizer_config: JsonFile, chat_template: tuple[str, str] | None
) -> ResponseTemplate | None:
    """Return the checkpoint's response template, or the built-in one for the calls that its chat template writes."""
    source = tokenizer_config.get("response_template")
    if source is None:
        return builtin_template(chat_template[0]) if chat_template else None
    try:
        return ResponseTemplate(source)
    except ResponseTemplateError as exc:
        raise ModelLoadError(f"{tokenizer_config.path}: {exc}; correct or remove it") from exc


def _default_template(entries: list[Any]) -> str | None:
    for entry in entries:
        match entry:
            case {"name": "default", "template": str(source)}:
                return source
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelLoadError(f"{path}: not readable as UTF-8 text: {exc}") from exc


def _optional(path: Path) -> JsonFile:
    return JsonFile.read(path) if path.is_file() else JsonFile(path, {})


def _special_tokens(*files: JsonFile) -> dict[str, str]:
    """Return entries such as "bos_token": "<s>" or {"content": "<s>", ...}; the first file that has one counts."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        for file in files:
            match file.get(name):
                case str(content) | {"content": str(content)}:
                    tokens.setdefault(name, content)
    return tokens
