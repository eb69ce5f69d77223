"""Writes the response bodies and stream chunks of the OpenAI API, as bytes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from os import urandom
from typing import Any, Literal

import orjson

from gateway.sse import event

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The token counts of one request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    reasoning_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str  # as the client named it
    system_fingerprint: str | None = None

    @classmethod
    def of_chat(cls, model: str, system_fingerprint: str | None = None) -> "Identity":
        return cls(f"chatcmpl-{urandom(16).hex()}", int(time.time()), model, system_fingerprint)

    @classmethod
    def of_completion(cls, model: str, system_fingerprint: str | None = None) -> "Identity":
        return cls(f"cmpl-{urandom(16).hex()}", int(time.time()), model, system_fingerprint)

    def to_json(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answer's texts, complete."""

    text: str
    finish_reason: FinishReason


def chat_completion(identity: Identity, choices: Sequence[Choice], usage: TokenUsage) -> bytes:
    return _completion(identity, "chat.completion", [_chat_choice(*pair) for pair in enumerate(choices)], usage)


def text_completion(identity: Identity, choices: Sequence[Choice], usage: TokenUsage) -> bytes:
    return _completion(identity, "text_completion", [_text_choice(*pair) for pair in enumerate(choices)], usage)


class ChatChunks:
    """Makes the events of one streamed chat choice: `start`, any number of `text`, `finish`, and perhaps `usage`.

    Everything but the text is encoded once, when the stream begins. An event that is given a `usage` includes it.
    """

    __slots__ = ("_event", "_text_head", "_text_tail")

    def __init__(self, identity: Identity, include_usage: bool, index: int = 0) -> None:
        self._event = _ChunkEvent(identity, "chat.completion.chunk", include_usage, index)
        self._text_head, self._text_tail = self._event.split({"delta": {"content": _PLACEHOLDER}}, None)

    def start(self, usage: TokenUsage | None = None) -> bytes:
        return self._event.choice({"delta": {"role": "assistant", "content": ""}}, None, usage)

    def text(self, text: str, usage: TokenUsage | None = None) -> bytes:
        if usage is not None:
            return self._event.choice({"delta": {"content": text}}, None, usage)
        return self._text_head + orjson.dumps(text) + self._text_tail

    def finish(self, reason: FinishReason, usage: TokenUsage | None = None) -> bytes:
        return self._event.choice({"delta": {}}, reason, usage)

    def usage(self, usage: TokenUsage) -> bytes:
        return self._event.usage(usage)


class CompletionChunks:
    """Makes the events of one streamed text choice, in the same order as `ChatChunks`; `start` is empty.

    A request with several prompts has one of these for each, and sends `usage` once.
    """

    __slots__ = ("_event", "_text_head", "_text_tail")

    def __init__(self, identity: Identity, include_usage: bool, index: int = 0) -> None:
        self._event = _ChunkEvent(identity, "text_completion", include_usage, index)
        self._text_head, self._text_tail = self._event.split({"text": _PLACEHOLDER}, None)

    def start(self, usage: TokenUsage | None = None) -> bytes:
        return b""

    def text(self, text: str, usage: TokenUsage | None = None) -> bytes:
        if usage is not None:
            return self._event.choice({"text": text}, None, usage)
        return self._text_head + orjson.dumps(text) + self._text_tail

    def finish(self, reason: FinishReason, usage: TokenUsage | None = None) -> bytes:
        return self._event.choice({"text": ""}, reason, usage)

    def usage(self, usage: TokenUsage) -> bytes:
        return self._event.usage(usage)


Chunks = ChatChunks | CompletionChunks


def model_card(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Returns an entry of /v1/models, or the body of /v1/models/{model}; `max_model_len` is vLLM's addition."""
    card = {"id": model, "object": "model", "created": created, "owned_by": "sluice", "root": model}
    return card | {"parent": None, "max_model_len": max_model_len}


def models_list(cards: Sequence[dict[str, Any]]) -> bytes:
    return orjson.dumps({"object": "list", "data": list(cards)})


def tokenized(tokens: Sequence[int], max_model_len: int, token_strs: Sequence[str | None] | None = None) -> bytes:
    """Returns the body that answers /tokenize, as vLLM's does."""
    body = {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens), "token_strs": token_strs}
    return orjson.dumps(body)


def detokenized(text: str) -> bytes:
    """Returns the body that answers /detokenize, as vLLM's does."""
    return orjson.dumps({"prompt": text})


_PLACEHOLDER = "\x00"  # stands for the text of a chunk


class _ChunkEvent:
    """Encodes the events of a stream around the fields that all of them share."""

    __slots__ = ("_fields", "_include_usage", "_index")

    def __init__(self, identity: Identity, kind: str, include_usage: bool, index: int) -> None:
        self._fields = identity.to_json(kind)
        self._include_usage = include_usage
        self._index = index

    def choice(
        self, content: dict[str, Any], finish_reason: FinishReason | None, usage: TokenUsage | None = None
    ) -> bytes:
        choice = {"index": self._index, **content, "logprobs": None, "finish_reason": finish_reason}
        usage_field = {"usage": usage and usage.to_json()} if self._include_usage else {}
        return event(orjson.dumps({**self._fields, "choices": [choice], **usage_field}))

    def split(self, content: dict[str, Any], finish_reason: FinishReason | None) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the text of a chunk whose content has `_PLACEHOLDER` for it."""
        head, _, tail = self.choice(content, finish_reason).rpartition(orjson.dumps(_PLACEHOLDER))
        return head, tail

    def usage(self, usage: TokenUsage) -> bytes:
        return event(orjson.dumps({**self._fields, "choices": [], "usage": usage.to_json()}))


def _completion(identity: Identity, kind: str, choices: list[dict[str, Any]], usage: TokenUsage) -> bytes:
    return orjson.dumps({**identity.to_json(kind), "choices": choices, "usage": usage.to_json()})


def _chat_choice(index: int, choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    return {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}
