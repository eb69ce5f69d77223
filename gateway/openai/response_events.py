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
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import urandom
from typing import Any, Literal

import orjson

from gateway import sse
from gateway.errors import ApiError
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, FinishReason, Identity, TokenUsage

Json = dict[str, Any]
Kind = Literal["reasoning", "message", "function_call"]

_ID_PREFIXES: Mapping[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class ResponseIdentity(Identity):
    """What each form of one response repeats; `echoed` are fields of the request."""

    echoed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_response(cls, model: str, echoed: Mapping[str, Any]) -> "ResponseIdentity":
        return cls(f"resp_{urandom(24).hex()}", int(time.time()), model, echoed=echoed)

    def response(
        self,
        output: list[Json],
        *,
        reason: FinishReason | None = None,
        usage: TokenUsage | None = None,
        error: ApiError | None = None,
    ) -> Json:
        """Returns the response as it is now: in progress without `reason` and `error`."""
        status = "in_progress"
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
            "background": False,
            "error": None if error is None else {"code": error.code or error.type, "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            **self.echoed,
            "usage": None if usage is None else usage_of_response(usage),
        }


def usage_of_response(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def whole_response(identity: ResponseIdentity, choice: Choice, usage: TokenUsage) -> bytes:
    message, output = choice.message or {"content": choice.text}, list[Json]()
    if reasoning := message.get("reasoning_content"):
        output.append(Item("reasoning", text=reasoning).whole("completed"))
    status = _item_status(choice.finish_reason)
    if (content := message.get("content")) is not None:
        logprobs = (choice.told.get("logprobs") or {}).get("content", [])
        output.append(Item("message", text=content, logprobs=logprobs).whole(status))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        output.append(Item("function_call", function["arguments"], call["id"], function["name"]).whole(status))
    return orjson.dumps(identity.response(output, reason=choice.finish_reason, usage=usage))


def _item_status(reason: FinishReason) -> str:
    return "incomplete" if reason == "length" else "completed"


class Item:
    """One item of a response's output."""

    def __init__(self, kind: Kind, text: str = "", call_id: str = "", name: str = "", logprobs: Any = ()) -> None:
        """`text`: of a call, its arguments."""
        self.kind: Kind = kind
        self.id = f"{_ID_PREFIXES[kind]}_{urandom(24).hex()}"
        self.texts = [text]
        self.logprobs: Any = logprobs if isinstance(logprobs, orjson.Fragment) else list(logprobs)
        self._call_id, self._name = call_id, name

    def begun(self) -> Json:
        """Returns the item before it has anything."""
        if self.kind == "function_call":
            return self._call("", "in_progress")
        return self._spoken([], "in_progress")

    def whole(self, status: str) -> Json:
        text = "".join(self.texts)
        return self._call(text, status) if self.kind == "function_call" else self._spoken([self.part(text)], status)

    def part(self, text: str) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}

    def _call(self, arguments: str, status: str) -> Json:
        called = {"call_id": self._call_id, "name": self._name, "arguments": arguments}
        return {"type": "function_call", "id": self.id, **called, "status": status}

    def _spoken(self, content: list[Json], status: str) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}


class ResponseEvents:
    """Makes the events of a streamed response."""

    def __init__(self, identity: ResponseIdentity, message: AnswerMessage | None) -> None:
        """`message` is what the text is parsed to; None: all of it is content."""
        self._identity, self._message = identity, message
        self._output: list[Json] = []
        self._item: Item | None = None
        self._num_events = 0
        self._reason: FinishReason = "stop"

    def start(self, usage: TokenUsage | None = None, beside: Mapping[str, Any] | None = None) -> bytes:
        response = self._identity.response([])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        """Returns the events of all that is new; none, if the text may still be part of a delimiter."""
        deltas = [{"content": text}] if self._message is None else self._message.deltas()
        logprobs = ((told or {}).get("logprobs") or {}).get("content", [])
        events: list[bytes] = []
        for delta in deltas:
            self._add(delta, logprobs, events)
        return b"".join(events)

    def finish(
        self, reason: FinishReason, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None
    ) -> bytes:
        self._reason = reason
        events = [self.text("", usage, told)] if self._message is not None else []
        if self._item is None and not self._output:
            self._begin(Item("message"), events)
        self._close(_item_status(reason), events)
        return b"".join(events)

    def end(self, usage: TokenUsage) -> bytes:
        response = self._identity.response(self._output, reason=self._reason, usage=usage)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """Returns the failed response, and the error in the two forms that clients look for."""
        told = orjson.loads(error.to_body())["error"]
        failed = self._event("response.failed", response=self._identity.response(self._output, error=error))
        beside = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return failed + self._event("error", error=told, **beside)

    def _add(self, delta: Mapping[str, Any], logprobs: list[Any], events: list[bytes]) -> None:
        """Append the events of a delta, as a chat's is."""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                self._begin(Item("function_call", "", call["id"], function["name"]), events)
            elif text := function["arguments"]:
                self._extend(text, "response.function_call_arguments.delta", events)
        for kind, name, event in _SPOKEN:
            if text := delta.get(name):
                if self._item is None or self._item.kind != kind:
                    self._begin(Item(kind), events)
                told = {"logprobs": logprobs} if kind == "message" else {}
                self._extend(text, event, events, content_index=0, **told)

    def _begin(self, item: Item, events: list[bytes]) -> None:
        self._close("completed", events)
        self._item = item
        events.append(self._event("response.output_item.added", output_index=len(self._output), item=item.begun()))
        if item.kind != "function_call":
            events.append(self._of_item("response.content_part.added", content_index=0, part=item.part("")))

    def _extend(self, text: str, event: str, events: list[bytes], **fields: Any) -> None:
        assert self._item is not None
        self._item.texts.append(text)
        self._item.logprobs += fields.get("logprobs", ())
        events.append(self._of_item(event, delta=text, **fields))

    def _close(self, status: str, events: list[bytes]) -> None:
        """Append the events that end the item, if there is one."""
        item = self._item
        if item is None:
            return
        text, whole = "".join(item.texts), item.whole(status)
        if item.kind == "function_call":
            done = {"arguments": text, "name": whole["name"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
        else:
            name = "reasoning_text" if item.kind == "reasoning" else "output_text"
            told = {} if item.kind == "reasoning" else {"logprobs": item.logprobs}
            events.append(self._of_item(f"response.{name}.done", content_index=0, text=text, **told))
            events.append(self._of_item("response.content_part.done", content_index=0, part=item.part(text)))
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=whole))
        self._output.append(whole)
        self._item = None

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item.id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\n%b" % (kind.encode(), sse.event(data))


_SPOKEN: tuple[tuple[Kind, str, str], ...] = (
    ("reasoning", "reasoning_content", "response.reasoning_text.delta"),
    ("message", "content", "response.output_text.delta"),
)
