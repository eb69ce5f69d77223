"""Writes messages as Anthropic's API does: whole, and as the events of a stream.

message_start
├── content_block_start          of each block: thinking, text, tool_use
│   content_block_delta ...
│   content_block_stop
message_delta                    why it ends, and its usage
message_stop
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway import sse
from gateway.anthropic.errors import error_event
from gateway.errors import ApiError
from gateway.ids import new_id
from gateway.openai.answer_blocks import BlockEncoder, blocks_of
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, ContentBlock, Ending, Identity, Kind, ReplyFinishReason, TokenUsage

Json = dict[str, Any]

_REASONS: Mapping[ReplyFinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(slots=True)
class MessageIdentity(Identity):
    """The fields of a message at its beginning."""

    @classmethod
    def of_message(cls, model: str) -> "MessageIdentity":
        return cls(new_id("msg_"), 0, model)

    def message(self, content: list[Json], usage: TokenUsage, ended: Json) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **ended, "usage": usage_of_message(usage)}


def usage_of_message(usage: TokenUsage) -> Json:
    """Returns the usage; tokens found in the cache are counted apart from the other tokens of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }


def _ended(reason: ReplyFinishReason | None, stop_string: str | None) -> Json:
    """The end of a message; nulls while it has not ended."""
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": None if reason is None else _REASONS[reason], "stop_sequence": None}


def whole_message(identity: MessageIdentity, choice: Choice, usage: TokenUsage) -> bytes:
    content = [_whole(block) for block in blocks_of(choice)]
    return orjson.dumps(identity.message(content, usage, _ended(choice.finish_reason, choice.stop_string)))


def _whole(block: ContentBlock) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _input(arguments: str) -> Any:
    """A call's arguments as an object; {} if a limit of length cut them."""
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments) if is_object else {}  # may be nested too deeply for the library


_DELTAS: Mapping[Kind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageEvents(BlockEncoder):
    """Makes the events of a streamed message."""

    def __init__(self, identity: MessageIdentity, message: AnswerMessage | None) -> None:
        super().__init__(message)
        self._identity = identity
        self._is_begun = False
        self._ended: Json = {}

    def start(self, usage: TokenUsage | None = None, beside: Mapping[str, Any] | None = None) -> bytes:
        return b""  # a message begins with its usage, known at the first token

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        return self._begun(usage) + super().text(text, usage, told)

    def begin(self, block: ContentBlock) -> bytes:
        whole = {**_whole(block), "input": {}} if block.kind == "call" else _whole(block)
        return _event("content_block_start", index=self.num_blocks, content_block=whole)

    def extend(self, kind: Kind, text: str, told: Mapping[str, Any] | None) -> bytes:
        name, field = _DELTAS[kind]
        return _event("content_block_delta", index=self.num_blocks, delta={"type": name, field: text})

    def close(self, kind: Kind, reason: ReplyFinishReason | None) -> bytes:
        return _event("content_block_stop", index=self.num_blocks)

    def finish(self, ending: Ending) -> bytes:
        self._ended = _ended(ending.reason, ending.stop_string)
        return self._begun(ending.usage) + self.end_blocks(ending.reason)

    def end(self, usage: TokenUsage) -> bytes:
        ended = _event("message_delta", delta=self._ended, usage=usage_of_message(usage))
        return ended + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def _begun(self, usage: TokenUsage | None) -> bytes:
        """Returns the event that begins the message, once."""
        if self._is_begun or usage is None:
            return b""
        self._is_begun = True
        return _event("message_start", message=self._identity.message([], usage, _ended(None, None)))


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named_event(kind, orjson.dumps({"type": kind, **fields}))
