"""An answer as blocks, one after another: reasoning, text, and calls of functions. Responses and Anthropic's messages
are made of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, FinishReason, TokenUsage

Kind = Literal["reasoning", "text", "call"]


class Block(NamedTuple):
    """A block before it has anything, or a whole one with its `text`: of a call, its arguments."""

    kind: Kind
    call_id: str = ""
    name: str = ""
    text: str = ""


def blocks_of(choice: Choice) -> Iterator[Block]:
    """Yields the blocks of a whole answer, at least one."""
    message = choice.message or {"content": choice.text}
    if reasoning := message.get("reasoning_content"):
        yield Block("reasoning", text=reasoning)
    if (content := message.get("content")) is not None:
        yield Block("text", text=content)
    for call in message.get("tool_calls", ()):
        yield Block("call", call["id"], call["function"]["name"], call["function"]["arguments"])


class BlockEncoder:
    """Makes the events of a streamed answer; a subclass says how a block begins, goes on and ends."""

    def __init__(self, message: AnswerMessage | None) -> None:
        """`message` is what the text is parsed to; None: all of it is text."""
        self._message = message
        self._kind: Kind | None = None  # of the block that is open
        self.num_blocks = 0  # that have ended

    def begin(self, block: Block) -> bytes:
        raise NotImplementedError

    def extend(self, kind: Kind, text: str, told: Mapping[str, Any] | None) -> bytes:
        raise NotImplementedError

    def close(self, kind: Kind, reason: FinishReason | None) -> bytes:
        """`reason`: why the answer ends with this block; None: it goes on."""
        raise NotImplementedError

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        """Returns the events of all that is new; none, if the text may still be part of a delimiter."""
        deltas = [{"content": text}] if self._message is None else self._message.deltas()
        return b"".join([event for delta in deltas for event in self._events(delta, told)])

    def end_blocks(self, reason: FinishReason, told: Mapping[str, Any] | None = None) -> bytes:
        """Returns the events of what was held back, and those that end the last block."""
        events = b"" if self._message is None else self.text("", None, told)
        if self._kind is None and not self.num_blocks:
            events += self._begin(Block("text"))
        return events + self._close(reason)

    def _events(self, delta: Mapping[str, Any], told: Mapping[str, Any] | None) -> Iterator[bytes]:
        """Yields the events of a chat's delta."""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield self._begin(Block("call", call["id"], function["name"]))
            elif arguments := function["arguments"]:
                yield self.extend("call", arguments, None)
        for kind, field in _FIELDS:
            if text := delta.get(field):
                if self._kind != kind:
                    yield self._begin(Block(kind))
                yield self.extend(kind, text, told)

    def _begin(self, block: Block) -> bytes:
        ended = self._close(None)
        self._kind = block.kind
        return ended + self.begin(block)

    def _close(self, reason: FinishReason | None) -> bytes:
        if self._kind is None:
            return b""
        ended = self.close(self._kind, reason)
        self._kind = None
        self.num_blocks += 1
        return ended


_FIELDS: tuple[tuple[Kind, str], ...] = (("reasoning", "reasoning_content"), ("text", "content"))
