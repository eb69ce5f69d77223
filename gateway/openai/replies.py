"""Writes the response bodies and stream chunks of the OpenAI API, as bytes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from gateway import sse
from gateway.errors import ApiError
from gateway.ids import new_id

ReplyFinishReason = Literal["stop", "length", "tool_calls"]
Kind = Literal["reasoning", "text", "call"]
_NOTHING: Mapping[str, Any] = {}


@dataclass(slots=True)
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


@dataclass(slots=True)
class Identity:
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str  # as the client named it
    system_fingerprint: str | None = None

    @classmethod
    def of_chat(cls, model: str, system_fingerprint: str | None = None) -> "Identity":
        return cls(new_id("chatcmpl-"), int(time.time()), model, system_fingerprint)

    @classmethod
    def of_completion(cls, model: str, system_fingerprint: str | None = None) -> "Identity":
        return cls(new_id("cmpl-"), int(time.time()), model, system_fingerprint)

    def to_json(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ContentBlock(NamedTuple):
    """A part of an answer: empty at first, or whole with its `text`; of a call, its arguments."""

    kind: Kind
    call_id: str = ""
    name: str = ""
    text: str = ""


@dataclass(slots=True)
class Choice:
    """One of the answer's texts, complete."""

    text: str
    finish_reason: ReplyFinishReason
    told: Mapping[str, Any] = field(default_factory=dict)  # of its tokens, as members of the choice
    told_of_prompt: Mapping[str, Any] = field(default_factory=dict)
    message: Mapping[str, Any] | None = None  # its members, if the text was parsed
    blocks: Sequence[ContentBlock] = ()  # in order, if the text was parsed
    stop_string: str | None = None  # the stop string that ended the text


def chat_completion(identity: Identity, choices: Sequence[Choice], usage: TokenUsage) -> bytes:
    told = choices[0].told_of_prompt
    return _completion(identity, "chat.completion", [_chat_choice(*pair) for pair in enumerate(choices)], usage, told)


def text_completion(identity: Identity, choices: Sequence[Choice], usage: TokenUsage) -> bytes:
    return _completion(identity, "text_completion", [_text_choice(*pair) for pair in enumerate(choices)], usage)


class Ending(NamedTuple):
    """The reason why a streamed choice ends, and the rest of its last event."""

    reason: ReplyFinishReason
    usage: TokenUsage | None = None
    told: Mapping[str, Any] | None = None
    stop_string: str | None = None  # the one that ended the text


class StreamEncoder(Protocol):
    """Encodes the events of one streamed choice: `start`, any number of `text`, `finish`, and for one of the choices
    `end`.

    An event may include the `usage` so far, and token details, `told`.
    """

    def start(self, usage: TokenUsage | None = None, beside: Mapping[str, Any] | None = None) -> bytes: ...

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes: ...

    def finish(self, ending: Ending) -> bytes: ...

    def end(self, usage: TokenUsage) -> bytes:
        """The end of the stream, after the last event of each choice."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The end of a failed stream."""
        ...


class Chunks:
    """Makes the events of chats and completions.

    Their common part is encoded once, when the stream begins; a dialect's own part is written below as JSON text. An
    event that is given a `usage` includes it.
    """

    __slots__ = ("_fields", "_head", "_include_usage", "_text_head", "_text_tail")

    KIND: str
    START: bytes  # the content of the first event; empty: there is none
    TEXT: tuple[bytes, bytes]  # what stands before and after the text
    FINISH: bytes  # the content of the last event

    def __init__(self, identity: Identity, include_usage: bool, index: int = 0) -> None:
        self._include_usage = include_usage
        self._fields = sse.START + orjson.dumps(identity.to_json(self.KIND)).removesuffix(b"}")
        self._head = b'%b,"choices":[{"index":%d,' % (self._fields, index)
        before, after = self.TEXT
        self._text_head, self._text_tail = self._head + before, after + self._tail(None, None)

    def start(self, usage: TokenUsage | None = None, beside: Mapping[str, Any] | None = None) -> bytes:
        """The first event, if it precedes any text. Members `beside` its choice describe the prompt."""
        if not self.START:
            return b""
        tail = self._tail(None, usage)
        if beside is not None:
            tail = tail.replace(b"}]", b"}]," + orjson.dumps(beside)[1:-1], 1)
        return self._head + self.START + tail

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        """An event; `told` are members of the choice with its token details."""
        is_plain = usage is None and told is None
        tail = self._text_tail if is_plain else self.TEXT[1] + self._tail(None, usage, told)
        return self._text_head + orjson.dumps(text) + tail

    def finish(self, ending: Ending) -> bytes:
        return self._head + self.FINISH + self._tail(ending.reason, ending.usage, ending.told)

    def end(self, usage: TokenUsage) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return b'%b,"choices":[],"usage":%b}%b%b' % (self._fields, orjson.dumps(usage.to_json()), sse.END, sse.DONE)

    def failure(self, error: ApiError) -> bytes:
        return error.to_sse()

    def _tail(
        self, reason: ReplyFinishReason | None, usage: TokenUsage | None, told: Mapping[str, Any] | None = None
    ) -> bytes:
        """The rest of an event behind the content of its choice."""
        if told is not None:
            members = orjson.dumps({"logprobs": None, **told, "finish_reason": reason})
            tail = b",%b]" % members.removeprefix(b"{")
        else:
            tail = b',"logprobs":null,"finish_reason":"%b"}]' % reason.encode() if reason else _UNFINISHED
        if not self._include_usage:
            return tail + b"}" + sse.END
        return b'%b,"usage":%b}%b' % (tail, orjson.dumps(usage and usage.to_json()), sse.END)


class ChatChunks(Chunks):
    __slots__ = ()

    KIND = "chat.completion.chunk"
    START = b'"delta":{"role":"assistant","content":""}'
    TEXT = (b'"delta":{"content":', b"}")
    FINISH = b'"delta":{}'


class CompletionChunks(Chunks):
    """Encodes the events of one prompt; of several prompts' encoders, one sends `usage`."""

    __slots__ = ()

    KIND = "text_completion"
    START = b""
    TEXT = (b'"text":', b"")
    FINISH = b'"text":""'


def model_card(
    model: str,
    created: int,
    max_model_len: int,
    capabilities: Mapping[str, bool] | None = None,
    parent: str | None = None,
) -> dict[str, Any]:
    """Returns an entry of /v1/models, or the body of /v1/models/{model}; `max_model_len` is vLLM's addition, and
    `capabilities` ours. An adapter's `parent` is its model.
    """
    card = {"id": model, "object": "model", "created": created, "owned_by": "sluice", "root": model}
    return card | {"parent": parent, "max_model_len": max_model_len, "capabilities": dict(capabilities or {})}


def models_list(cards: Sequence[dict[str, Any]]) -> bytes:
    return orjson.dumps({"object": "list", "data": list(cards)})


def tokenized(tokens: Sequence[int], max_model_len: int, token_strs: Sequence[str | None] | None = None) -> bytes:
    """Returns the body that answers /tokenize, as vLLM's does."""
    body = {"count": len(tokens), "max_model_len": max_model_len, "tokens": list(tokens), "token_strs": token_strs}
    return orjson.dumps(body)


def detokenized(text: str) -> bytes:
    """Returns the body that answers /detokenize, as vLLM's does."""
    return orjson.dumps({"prompt": text})


_UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


def _completion(
    identity: Identity, kind: str, choices: list[dict[str, Any]], usage: TokenUsage, told: Mapping[str, Any] = _NOTHING
) -> bytes:
    return orjson.dumps({**identity.to_json(kind), "choices": choices, "usage": usage.to_json(), **told})


def _chat_choice(index: int, choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None, **(choice.message or {})}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason, **choice.told}


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    told = {**choice.told, **choice.told_of_prompt}
    return {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason, **told}
