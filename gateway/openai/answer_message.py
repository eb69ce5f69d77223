"""The message that an answer's text is parsed into, and the events of its stream."""

import string
from collections.abc import Mapping
from os import urandom
from typing import Any

import orjson

from backend.text.response_templates.calls import CallArguments, CallStart
from backend.text.response_templates.parser import Event, Part, ResponseParser, TextDelta
from gateway.openai.replies import ChatChunks, ContentBlock, Ending, Identity, Kind, TokenUsage

_ALPHABET = string.ascii_letters + string.digits


def new_call_id(length: int | None) -> str:
    """A new call id, of `length` letters and digits if the chat template wants that many."""
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
        self.are_content: list[bool] | None = None  # of each token so far; None: not requested
        self._blocks: list[tuple[ContentBlock, list[str]]] = []  # and the pieces of their texts
        self._num_calls = 0
        self._new: list[dict[str, Any]] = []  # deltas not yet returned by `deltas`

    @property
    def may_reason(self) -> bool:
        return self._parser.may_reason

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    @property
    def is_over(self) -> bool:
        """True if the message is complete: no later text can belong to it."""
        return self.is_single and self.has_calls and not self._parser.is_in_call

    @property
    def is_in_call(self) -> bool:
        """True if a call has begun and not ended."""
        return self._parser.is_in_call

    def push(self, text: str) -> None:
        """Take the text of one token, perhaps none."""
        parser = self._parser
        reasoned, called = parser.is_reasoning, parser.is_in_call
        self._add(parser.feed(text))
        self.num_reasoning_tokens += reasoned or parser.is_reasoning
        if self.are_content is not None:
            self.are_content.append(not (reasoned or called or parser.is_reasoning or parser.is_in_call))

    def finish(self, rest: str = "", is_cut: bool = False) -> None:
        """End the text with the `rest` that was held back. `is_cut`: it reached its limit of length."""
        self._add(self._parser.feed(rest))
        self._add(self._parser.end_text(is_cut))

    def deltas(self) -> list[dict[str, Any]]:
        """Additions to the message since the last call, as deltas of a stream."""
        deltas, self._new = self._new, []
        return deltas

    def members(self) -> dict[str, Any]:
        """The members of the whole message, for an answer that is not streamed."""
        blocks = self.blocks()
        content, reasoning = (
            "".join([one.text for one in blocks if one.kind == kind]) for kind in ("text", "reasoning")
        )
        calls = [_whole(one) for one in blocks if one.kind == "call"]
        told: dict[str, Any] = {"content": content if content or not (reasoning or calls) else None}
        if reasoning:
            told["reasoning_content"] = reasoning
        if calls:
            told["tool_calls"] = calls
        return told

    def blocks(self) -> list[ContentBlock]:
        return [block._replace(text="".join(pieces)) for block, pieces in self._blocks]

    def _add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case _ if self._is_over_before(event):
                    return
                case TextDelta(Part.REASONING, _) if not self._shows_reasoning:
                    pass
                case TextDelta(part, text):
                    self._extend(_KINDS[part], text)
                    self._new.append({_FIELDS[part]: text})
                case CallStart(name):
                    self._begin_call(name)
                case CallArguments(text):
                    self._extend("call", text)
                    index = self._num_calls - 1
                    self._new.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def _extend(self, kind: Kind, text: str) -> None:
        if not self._blocks or self._blocks[-1][0].kind != kind:
            self._blocks.append((ContentBlock(kind), []))
        self._blocks[-1][1].append(text)

    def _is_over_before(self, event: Event) -> bool:
        """True if the event comes after the message's only call."""
        return self.is_single and self.has_calls and not isinstance(event, CallArguments)

    def _begin_call(self, name: str) -> None:
        call_id = new_call_id(self._id_length)
        told = {"index": self._num_calls, "id": call_id, "type": "function"}
        self._num_calls += 1
        self._blocks.append((ContentBlock("call", call_id, name), []))
        self._new.append({"tool_calls": [{**told, "function": {"name": name, "arguments": ""}}]})


_FIELDS = {Part.CONTENT: "content", Part.REASONING: "reasoning_content"}
_KINDS: Mapping[Part, Kind] = {Part.CONTENT: "text", Part.REASONING: "reasoning"}


def _whole(call: ContentBlock) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


class MessageChunks(ChatChunks):
    """Makes the events of a streamed choice whose text is parsed: the parts of its message since the last event."""

    __slots__ = ("_message", "_told")

    def __init__(self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage) -> None:
        super().__init__(identity, include_usage, index)
        self._message = message
        self._told: dict[str, Any] | None = None  # of tokens whose text is held back

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        """The events of all deltas; none while the text may still be part of a delimiter."""
        self._told = joined(self._told, told)
        events = []
        for delta in self._message.deltas():
            told, self._told = self._told, None
            events.append(b'%b"delta":%b%b' % (self._head, orjson.dumps(delta), self._tail(None, usage, told)))
        return b"".join(events)

    def finish(self, ending: Ending) -> bytes:
        before = self.text("", ending.usage, ending.told)
        told, self._told = self._told, None
        return before + super().finish(ending._replace(told=told))


def joined(one: Any, other: Any) -> Any:
    """The token details of two events as one; null if neither has any."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: joined(one.get(name), other.get(name)) for name in {**one, **other}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other if one is None else one
