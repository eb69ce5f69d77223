"""Writes log probabilities as OpenAI's API and vLLM's do: of chats, of completions, and of prompts.

A token that is no whole text, such as a part of a character, is spelled by its bytes: as escapes in chats ("\\xf0"),
and behind "bytes:" in completions, as OpenAI does. The logarithm of no probability at all is `MIN_LOGPROB`, as in vLLM.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from backend.scheduler.batch import TokenLogprobs
from backend.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity


class ToldToken(NamedTuple):
    """A token with its place in the text that the client gets."""

    token_id: int
    offset: int  # characters of the text before it
    logprobs: TokenLogprobs | None  # None for the first token of a prompt, which follows nothing


class Spelling:
    """Spells the tokens of one request."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        """`as_ids`: tokens are spelled by id, "token_id:42", which is unambiguous."""
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes(skip_special_tokens=False)
        self._as_ids = as_ids

    def data(self, token_id: int) -> bytes:
        """The bytes of a token; if tokens depend on their neighbours, of its text alone."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def in_chat(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._text(token_id) or self.data(token_id).decode("utf-8", "backslashreplace")

    def in_completion(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        text = self._text(token_id)
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in self.data(token_id)]) if text is None else text

    def _text(self, token_id: int) -> str | None:
        """Returns the text of a token; None where its bytes are no whole characters."""
        if self._token_bytes is not None:
            return self._token_bytes.texts[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def chat_logprobs(tokens: Sequence[ToldToken], spelling: Spelling, top: int) -> dict[str, list[Any]]:
    """Return the content of a chat choice's `logprobs`, with the `top` most likely tokens at each position."""
    content = []
    for token_id, _, found in tokens:
        assert found is not None, "an answer's tokens all follow another"
        likely = zip(found.token_ids[:top], found.logprobs[:top], strict=True)
        entry = _chat_entry(token_id, found.logprob, spelling)
        content.append(entry | {"top_logprobs": [_chat_entry(*one, spelling) for one in likely]})
    return {"content": content}


def _chat_entry(token_id: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
    data = list(spelling.data(token_id))
    return {"token": spelling.in_chat(token_id), "logprob": max(logprob, MIN_LOGPROB), "bytes": data}


def completion_logprobs(tokens: Sequence[ToldToken], spelling: Spelling, top: int) -> dict[str, list[Any]]:
    """A completion choice's `logprobs`. The sampled token is always among the most likely ones, perhaps as one more
    than requested.
    """
    told: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, offset, found in tokens:
        name = spelling.in_completion(token_id)
        told["text_offset"].append(offset)
        told["tokens"].append(name)
        told["token_logprobs"].append(None if found is None else max(found.logprob, MIN_LOGPROB))
        told["top_logprobs"].append(None if found is None else _most_likely(name, found, spelling, top))
    return told


def _most_likely(name: str, found: TokenLogprobs, spelling: Spelling, top: int) -> dict[str, float]:
    """Log probabilities by token; of tokens spelled alike, the highest."""
    likely: dict[str, float] = {}
    for token_id, logprob in zip(found.token_ids[:top], found.logprobs[:top], strict=True):
        likely.setdefault(spelling.in_completion(token_id), max(logprob, MIN_LOGPROB))
    likely.setdefault(name, max(found.logprob, MIN_LOGPROB))
    return likely


def prompt_logprobs(tokens: Sequence[ToldToken], spelling: Spelling, top: int) -> dict[str, list[Any]]:
    """vLLM's `prompt_logprobs`: for each token of a prompt but the first, the most likely ones and itself, by id."""
    return {"prompt_logprobs": [_of_prompt(token_id, found, spelling, top) for token_id, _, found in tokens]}


def _of_prompt(token_id: int, found: TokenLogprobs | None, spelling: Spelling, top: int) -> dict[str, Any] | None:
    if found is None:
        return None
    ranked = zip(found.token_ids[:top], found.logprobs[:top], range(1, top + 1), strict=False)
    entries = [(token_id, found.logprob, found.rank), *ranked]
    return {
        str(one): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": spelling.in_chat(one)}
        for one, logprob, rank in entries
    }
