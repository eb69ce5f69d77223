"""An answer as blocks, one after another: reasoning, text, and calls of functions. Responses and Anthropic's messages
are made of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.openai.answer_message import AnswerMessage, joined
from gateway.openai.replies import Choice, ContentBlock, Kind, ReplyFinishReason, TokenUsage


def blocks_of(choice: Choice) -> Sequence[ContentBlock]:
    """Returns the blocks of a whole answer, at least one."""
    return choice.blocks or [ContentBlock("text", text=choice.text if choice.message is None else "")]


class BlockEncoder:
    """Makes the events of a streamed answer; a subclass says how a block begins, goes on and ends."""

    def __init__(self, message: AnswerMessage | None) -> None:
        """`message`: the message that the text is parsed into; None: all of it is text."""
        self._message = message
        self._kind: Kind | None = None  # of the block that is open
        self._told: Mapping[str, Any] | None = None  # of tokens whose text is held back
        self.num_blocks = 0  # blocks that have ended

    def begin(self, block: ContentBlock) -> bytes:
        raise NotImplementedError

    def extend(self, kind: Kind, text: str, told: Mapping[str, Any] | None) -> bytes:
        raise NotImplementedError

    def close(self, kind: Kind, reason: ReplyFinishReason | None) -> bytes:
        """`reason`: the finish reason, if the answer ends with this block; None: it goes on."""
        raise NotImplementedError

    def text(self, text: str, usage: TokenUsage | None = None, told: Mapping[str, Any] | None = None) -> bytes:
        """The events of the new text; none while it may still be part of a delimiter."""
        self._told = joined(self._told, told)
        deltas = [{"content": text}] if self._message is None else self._message.deltas()
        return b"".join([event for delta in deltas for event in self._events(delta)])

    def end_blocks(self, reason: ReplyFinishReason, told: Mapping[str, Any] | None = None) -> bytes:
        """The events of the text held back, and of the end of the last block."""
        events = BlockEncoder.text(self, "", None, told)
        if self._kind is None and not self.num_blocks:
            events += self._begin(ContentBlock("text"))
        return events + self._close(reason)

    def _events(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the events of a chat's delta."""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield self._begin(ContentBlock("call", call["id"], function["name"]))
            elif arguments := function["arguments"]:
                yield self.extend("call", arguments, None)
        for kind, field in _FIELDS:
            if text := delta.get(field):
                if self._kind != kind:
                    yield self._begin(ContentBlock(kind))
                yield self._extend_text(kind, text)

    def _begin(self, block: ContentBlock) -> bytes:
        ended = self._close(None)
        self._kind = block.kind
        return ended + self.begin(block)

    def _extend_text(self, kind: Kind, text: str) -> bytes:
        told = None
        if kind == "text":
            told, self._told = self._told, None
        return self.extend(kind, text, told)

    def _close(self, reason: ReplyFinishReason | None) -> bytes:
        if self._kind is None:
            return b""
        ended = self._extend_text("text", "") if self._kind == "text" and self._told else b""
        ended += self.close(self._kind, reason)
        self._kind = None
        self.num_blocks += 1
        return ended


_FIELDS: tuple[tuple[Kind, str], ...] = (("reasoning", "reasoning_content"), ("text", "content"))
