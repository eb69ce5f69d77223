"""The message that an answer's text is parsed to, and the events of a stream of it."""

import string
from collections.abc import Mapping
from os import urandom
from typing import Any

import orjson

from backend.text.response_templates.calls import CallArguments, CallStart
from backend.text.response_templates.parser import Event, Part, ResponseParser, TextDelta
from gateway.openai.replies import ChatChunks, FinishReason, Identity, TokenUsage

_ALPHABET = string.ascii_letters + string.digits


def new_call_id(length: int | None) -> str:
    """Return a new call id, of `length` letters and digits where a chat template takes no others."""
    if length is None:
        return f"call_{urandom(12).hex()}"
    return "".join([_ALPHABET[byte % len(_ALPHABET)] for byte in urandom(length)])


class AnswerMessage:
    """One answer's message. Text is pushed token by token, so that the tokens of its reasoning are counted."""

    def __init__(
        self,
        parser: ResponseParser,
        *,
        shows_reasoning: bool = True,
        is_single: bool = False,
        id_length: int | None = None,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """`is_single`: the message ends with its first call. `stop_tokens` end it as a stop string does."""
        self.stop_tokens = stop_tokens
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self.is_single = is_single
        self._id_length = id_length
        self._texts = {part: list[str]() for part in Part}
        self._calls: list[dict[str, Any]] = []
        self._new: list[dict[str, Any]] = []  # deltas that were not taken yet

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def is_over(self) -> bool:
        """Whether the message is complete: no later text can belong to it."""
        return self.is_single and self.has_calls and not self._parser.is_in_call

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._parser.is_in_call

    def push(self, text: str) -> None:
        """Take the text of a token, of which there may be none."""
        reasoned = self._parser.is_reasoning
        self._add(self._parser.feed(text))
        self.num_reasoning_tokens += reasoned or self._parser.is_reasoning

    def finish(self, rest: str = "", is_cut: bool = False) -> None:
        """End the text, with what of it was held back. `is_cut`: it has reached its limit of length."""
        self._add(self._parser.feed(rest))
        self._add(self._parser.finish(is_cut))

    def deltas(self) -> list[dict[str, Any]]:
        """Returns what has been added to the message since the last call, as deltas of a stream."""
        deltas, self._new = self._new, []
        return deltas

    def members(self) -> dict[str, Any]:
        """Returns what the whole message has, as an answer that is not streamed."""
        content, reasoning = ("".join(self._texts[part]) for part in (Part.CONTENT, Part.REASONING))
        told: dict[str, Any] = {"content": content if content or not (reasoning or self._calls) else None}
        if reasoning:
            told["reasoning_content"] = reasoning
        if self._calls:
            told["tool_calls"] = [_whole(call) for call in self._calls]
        return told

    def _add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case _ if self._is_over_before(event):
                    return
                case TextDelta(Part.REASONING, _) if not self._shows_reasoning:
                    pass
                case TextDelta(part, text):
                    self._texts[part].append(text)
                    self._new.append({_FIELDS[part]: text})
                case CallStart(name):
                    self._begin_call(name)
                case CallArguments(text):
                    self._calls[-1]["arguments"].append(text)
                    index = len(self._calls) - 1
                    self._new.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def _is_over_before(self, event: Event) -> bool:
        """Whether an event comes after the message's only call."""
        return self.is_single and self.has_calls and not isinstance(event, CallArguments)

    def _begin_call(self, name: str) -> None:
        call_id = new_call_id(self._id_length)
        told = {"index": len(self._calls), "id": call_id, "type": "function"}
        self._calls.append({"id": call_id, "name": name, "arguments": []})
        self._new.append({"tool_calls": [{**told, "function": {"name": name, "arguments": ""}}]})


_FIELDS = {Part.CONTENT: "content", Part.REASONING: "reasoning_content"}


def _whole(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": "".join(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


class MessageChunks(ChatChunks):
    """Makes the events of a streamed choice whose text is parsed: the parts of its message since the last event."""

    __slots__ = ("_message", "_told")

    def __init__(self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage) -> None:
        super().__init__(identity, include_usage, index)
        self._message = message
        self._told: dict[str, Any] | None = None  # of tokens whose text is held back

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        """Returns the events of all deltas; none, if the text may still be part of a delimiter."""
        self._keep(told)
        events = []
        for delta in self._message.deltas():
            told, self._told = self._told, None
            events.append(b'%b"delta":%b%b' % (self._head, orjson.dumps(delta), self._tail(None, usage, told)))
        return b"".join(events)

    def finish(
        self,
        reason: FinishReason,
        usage: TokenUsage | None = None,
        told: Mapping[str, Any] | None = None,
        stop_string: str | None = None,
    ) -> bytes:
        before = self.text("", usage, told)
        told, self._told = self._told, None
        return before + super().finish(reason, usage, told)

    def _keep(self, told: Mapping[str, Any] | None) -> None:
        """Keep what is told of tokens until there is an event for it."""
        if told is None or self._told is None:
            self._told = self._told if told is None else dict(told)
            return
        for name, value in told.items():
            self._told[name] = _joined(self._told.get(name), value)


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _joined(one.get(name), other.get(name)) for name in {**one, **other}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other if one is None else one
