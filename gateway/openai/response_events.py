"""Writes responses: whole, and as the events of a stream.

response.created, response.in_progress
├── response.output_item.added           of each item: reasoning, a message, a call of a function
│   ├── response.content_part.added      of reasoning and messages
│   │   ├── response.output_text.delta, or response.reasoning_text.delta
│   │   ├── ....done
│   │   └── response.content_part.done
│   └── response.function_call_arguments.delta, ....done
│   response.output_item.done
└── response.completed, response.incomplete, or response.failed and error
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway import sse
from gateway.errors import ApiError
from gateway.ids import new_id
from gateway.openai.answer_blocks import BlockEncoder, blocks_of
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, ContentBlock, Ending, Identity, Kind, ReplyFinishReason, TokenUsage
from gateway.openai.response_items import OUTPUT_ORDINAL, item_id

Json = dict[str, Any]

_TYPES: Mapping[Kind, str] = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
_DELTAS: Mapping[Kind, str] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


_CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # OpenAI's, by status


@dataclass(slots=True)
class ResponseIdentity(Identity):
    """One response, as all of its forms have it; `echoed` are fields of the request."""

    echoed: Json = field(default_factory=dict)
    items: list[Json] = field(default_factory=list)  # of the input
    output: list[Json] = field(default_factory=list)  # items that have ended, of a stream
    num_events: int = 0  # of its stream so far
    completed: "Callable[[Json], Awaitable[None]] | None" = None  # stores the whole response, of one in the background

    @classmethod
    def of_response(cls, model: str, echoed: Json, items: list[Json]) -> "ResponseIdentity":
        return cls(new_id("resp_", 24), int(time.time()), model, echoed=echoed, items=items)

    def item(self, block: ContentBlock, ordinal: int) -> "Item":
        return Item(item_id(_TYPES[block.kind], self.id, OUTPUT_ORDINAL + ordinal), block)

    def response(
        self,
        output: list[Json],
        *,
        reason: ReplyFinishReason | None = None,
        usage: TokenUsage | None = None,
        error: ApiError | None = None,
        status: str = "in_progress",
    ) -> Json:
        """The response as it is now; of this `status` without `reason` and `error`."""
        if error is not None:
            status = "failed"
        elif reason is not None:
            status = "incomplete" if reason == "length" else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _told(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            **self.echoed,
            "usage": None if usage is None else usage_of_response(usage),
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event of its stream."""
        number, self.num_events = self.num_events, self.num_events + 1
        return sse.named_event(kind, orjson.dumps({"type": kind, "sequence_number": number, **fields}))


def _told(error: ApiError) -> Json:
    return {"code": _CODES.get(error.status, "server_error"), "message": error.message}


def usage_of_response(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def whole_response(identity: ResponseIdentity, choice: Choice, usage: TokenUsage) -> Json:
    items = [identity.item(block, ordinal) for ordinal, block in enumerate(blocks_of(choice))]
    first_text = next((item for item in items if item.kind == "text"), None)
    if first_text is not None:
        first_text.logprobs = (choice.told.get("logprobs") or {}).get("content", [])
    output = [item.whole("completed") for item in items[:-1]] + [items[-1].whole(_item_status(choice.finish_reason))]
    return identity.response(output, reason=choice.finish_reason, usage=usage)


def _item_status(reason: ReplyFinishReason | None) -> str:
    return "incomplete" if reason == "length" else "completed"


class Item:
    """One item of a response's output."""

    def __init__(self, name: str, block: ContentBlock) -> None:
        self.kind = block.kind
        self.id = name
        self.texts = [block.text]
        self.logprobs: Any = []  # of its tokens, as a chat's
        self._block = block

    def begun(self) -> Json:
        """The empty item at its beginning."""
        if self.kind == "call":
            return self._call("", "in_progress")
        return self._spoken([], "in_progress")

    def whole(self, status: str) -> Json:
        text = "".join(self.texts)
        return self._call(text, status) if self.kind == "call" else self._spoken([self.part(text)], status)

    def part(self, text: str) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def _call(self, arguments: str, status: str) -> Json:
        called = {"call_id": self._block.call_id, "name": self._block.name, "arguments": arguments}
        return {"type": "function_call", "id": self.id, **called, "status": status}

    def _spoken(self, content: list[Json], status: str) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}


class ResponseEvents(BlockEncoder):
    """Makes the events of a streamed response."""

    def __init__(self, identity: ResponseIdentity, message: AnswerMessage | None) -> None:
        super().__init__(message)
        self.identity = identity
        self._item = identity.item(ContentBlock("text"), 0)  # the open block's
        self._reason: ReplyFinishReason = "stop"

    def start(self, usage: TokenUsage | None = None, beside: Mapping[str, Any] | None = None) -> bytes:
        response = self.identity.response([])
        created = b"" if self.identity.num_events else self.identity.event("response.created", response=response)
        return created + self.identity.event("response.in_progress", response=response)

    def begin(self, block: ContentBlock) -> bytes:
        item = self._item = self.identity.item(block, self.num_blocks)
        added = self.identity.event("response.output_item.added", output_index=self.num_blocks, item=item.begun())
        if block.kind == "call":
            return added
        return added + self._of_item("response.content_part.added", content_index=0, part=item.part(""))

    def extend(self, kind: Kind, text: str, told: Mapping[str, Any] | None) -> bytes:
        self._item.texts.append(text)
        fields: Json = {} if kind == "call" else {"content_index": 0}
        if kind == "text":
            fields["logprobs"] = ((told or {}).get("logprobs") or {}).get("content", [])
            self._item.logprobs += fields["logprobs"]
        return self._of_item(f"{_DELTAS[kind]}.delta", delta=text, **fields)

    def close(self, kind: Kind, reason: ReplyFinishReason | None) -> bytes:
        item = self._item
        text, whole = "".join(item.texts), item.whole(_item_status(reason))
        self.identity.output.append(whole)
        if kind == "call":
            ended = self._of_item(f"{_DELTAS[kind]}.done", arguments=text, name=whole["name"])
        else:
            told = {"logprobs": item.logprobs} if kind == "text" else {}
            ended = self._of_item(f"{_DELTAS[kind]}.done", content_index=0, text=text, **told)
            ended += self._of_item("response.content_part.done", content_index=0, part=item.part(text))
        return ended + self.identity.event("response.output_item.done", output_index=self.num_blocks, item=whole)

    def finish(self, ending: Ending) -> bytes:
        self._reason = ending.reason
        return self.end_blocks(ending.reason, ending.told)

    def response(self, usage: TokenUsage) -> Json:
        """Returns the whole response, once its last block has ended."""
        return self.identity.response(self.identity.output, reason=self._reason, usage=usage)

    def end(self, usage: TokenUsage) -> bytes:
        return self.ended(self.response(usage))

    def ended(self, response: Json) -> bytes:
        """Returns the last event, which holds the whole response."""
        return self.identity.event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """Returns the failed response, and the error in the two forms that clients look for."""
        told = orjson.loads(error.to_body())["error"]
        response = self.identity.response(self.identity.output, error=error)
        failed = self.identity.event("response.failed", response=response)
        beside = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return failed + self.identity.event("error", error=told, **beside)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self.identity.event(kind, item_id=self._item.id, output_index=self.num_blocks, **fields)
