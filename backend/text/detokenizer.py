"""The detokenizer turns tokens into text as they come, exactly and in bounded work."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

from backend.text.token_bytes import TokenBytes
from backend.text.tokenizer import Tokenizer


class StopMatcher:
    """Passes text through until a stop string is complete, and holds back only text that may still become a stop.

    The stop that is complete first ends the text; of two complete at the same character, the longer. The result does
    not depend on how the text is cut into pieces. Work is amortised O(1) for each character for any number of stops,
    and the longest stop less one character is the most that is held back.

    The search is that of Aho and Corasick (1975). Its automaton is built only where the text leads, so that long or
    numerous stops that never match cost nothing.
    """

    __slots__ = ("_held", "_include_stop", "_node", "stopped")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self.stopped: str | None = None
        self._node = _Node.root(stops)
        self._held = ""
        self._include_stop = include_stop

    def push(self, text: str) -> str:
        """Return the text that is now safe to send; nothing more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        node = self._node
        for position, char in enumerate(text):
            node = node.after(char)
            if node.stop is not None:
                return self._stop(self._held + text[: position + 1], node.stop)
        self._node = node
        text = self._held + text
        safe = len(text) - node.depth
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the text held back, when the end comes before a stop."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, stop: str) -> str:
        self.stopped, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Node:
    """A state of the search: the text ends with the first `depth` characters of `_stops`, and with no longer beginning
    of a stop.
    """

    __slots__ = ("_children", "_root", "_shorter", "_stops", "depth", "stop")

    def __init__(self, stops: list[str], depth: int, shorter: Self | None, root: Self | None) -> None:
        """`shorter` is the node of the longest proper suffix that begins a stop; the root has none."""
        self.depth = depth
        self.stop: str | None = next((stop for stop in stops if len(stop) == depth), shorter.stop if shorter else None)
        self._stops = stops
        self._shorter = shorter
        self._root = root or self
        self._children: dict[str, Self | None] = {}  # by the next character, for characters that have come

    @classmethod
    def root(cls, stops: tuple[str, ...]) -> Self:
        return cls(list(stops), 0, None, None)

    def after(self, char: str) -> Self:
        """Return the node after one more character."""
        node: Self | None = self
        while node is not None:
            if (child := node._child(char)) is not None:
                return child
            node = node._shorter
        return self._root

    def _child(self, char: str) -> Self | None:
        """Return the node for these stops' beginning and `char`; None if no stop continues with it."""
        try:
            return self._children[char]
        except KeyError:
            child = self._children[char] = self._make_child(char)
            return child

    def _make_child(self, char: str) -> Self | None:
        depth = self.depth
        stops = [stop for stop in self._stops if len(stop) > depth and stop[depth] == char]
        if not stops:
            return None
        shorter = self._shorter.after(char) if self._shorter else None
        return type(self)(stops, depth + 1, shorter or self._root, self._root)


MAX_HELD_TOKENS = 16  # the most tokens that wait for a complete character, in decoders without a byte rule
_CONTEXT_TOKENS = 4
_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """Turns one sequence's output ids into text. `push` and `finish` together return the decoded text up to the stop.

    - A character is sent when its last byte has come. Bytes that can never become a character are sent as U+FFFD as
      soon as that is certain, so at most three bytes wait.
    - For byte-level BPE the text equals `Tokenizer.decode` of all ids, except for an unfinished character at the end,
      which is not sent. With byte fallback the same holds while the byte tokens are valid UTF-8; otherwise `decode`
      drops a whole run of bytes, whose valid part is kept here. Other decoders (Metaspace, WordPiece) are read through
      a window of at most `MAX_HELD_TOKENS`.
    - No part of a stop string is sent, unless `include_stop`; `stopped` names the stop that ended the text.
    - `prompt_tail` holds the last few ids of the prompt when the output continues its text, as in a completion: a
      leading space survives, and a character begun there is completed. Leave it empty if the answer is a text of its
      own.
    - Stop strings are searched for after the first `min_tokens` ids.
    - `in_message`: special tokens that delimit the parts of a message are not skipped, so that it can be parsed.
    - `keeps_spaces`: the text is what a grammar matched, also the space that a decoder of Llama 2's kind drops first.
    """

    __slots__ = ("_decoder", "_matcher", "_unchecked", "may_stop")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
        min_tokens: int = 0,
        in_message: bool = False,
        keeps_spaces: bool = False,
    ) -> None:
        context = prompt_tail[-_CONTEXT_TOKENS:]
        self._decoder = _decoder(tokenizer, skip_special_tokens, context, in_message, keeps_spaces)
        self.may_stop = bool(stop)  # there are stop strings to search for
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._unchecked = min_tokens if stop else 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matcher.stopped if self._matcher else None

    def push(self, token_ids: Sequence[int]) -> str:
        """Return new text that is safe to send, often all of it, sometimes none. Nothing more comes after a stop."""
        if self._unchecked:
            return self._push_unchecked(token_ids)
        text = self._decoder.decode(token_ids)
        return self._matcher.push(text) if self._matcher and text else text

    def push_each(self, token_ids: Iterable[int]) -> list[str]:
        """Return the texts that `push` would return for each id by itself, empty ones left out."""
        if self._matcher is None:
            return list(filter(None, map(self._decoder.decode_token, token_ids)))
        return [text for token_id in token_ids if (text := self.push((token_id,)))]

    def flush(self) -> str:
        """Return the text held back for stop strings, when the ids have ended; "" after a stop."""
        if self._matcher is None:
            return self._decoder.flush()
        return self._matcher.push(self._decoder.flush()) + self._matcher.flush()

    def _push_unchecked(self, token_ids: Sequence[int]) -> str:
        free = min(self._unchecked, len(token_ids))
        self._unchecked -= free
        text = self._decoder.decode(token_ids[:free])
        return text + self.push(token_ids[free:]) if free < len(token_ids) else text


class _Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...

    def decode_token(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def _decoder(
    tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int], in_message: bool, keeps_spaces: bool
) -> _Decoder:
    table = tokenizer.token_bytes(skip_special_tokens, in_message)
    if table is None:
        return _WindowDecoder(tokenizer, skip_special_tokens and not in_message, context)
    return _ByteDecoder(table, 0 if keeps_spaces else tokenizer.strip_left, context)


class _ByteDecoder:
    """Decodes tokens that are bytes: it looks them up and decodes UTF-8 incrementally.

    Most tokens are whole characters, whose text is looked up unless a character waits for its end.
    """

    __slots__ = ("_bytes_of", "_pending", "_strip_left", "_text_of")

    def __init__(self, table: TokenBytes, strip_left: int, context: Sequence[int]) -> None:
        self._bytes_of = table.__getitem__
        self._text_of = table.texts.__getitem__
        self._pending = b""  # the start of a character, at most 3 bytes
        self._strip_left = strip_left  # spaces still to drop before the text begins
        if context:
            self.decode(context)

    def decode(self, token_ids: Sequence[int]) -> str:
        data = self._pending + b"".join(map(self._bytes_of, token_ids))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._strip(text) if self._strip_left and text else text

    def decode_token(self, token_id: int) -> str:
        is_between_characters = not (self._pending or self._strip_left)
        text = self._text_of(token_id) if is_between_characters else None
        return self.decode((token_id,)) if text is None else text

    def flush(self) -> str:
        self._pending = b""
        return ""

    def _strip(self, text: str) -> str:
        dropped = 0
        while dropped < min(self._strip_left, len(text)) and text[dropped] == " ":
            dropped += 1
        self._strip_left = self._strip_left - dropped if dropped == len(text) else 0
        return text[dropped:]


class _WindowDecoder:
    """Decodes tokens that depend on their neighbours: a window twice, with and without the new tokens (vLLM, TGI).

    Text that ends with U+FFFD waits for its character; after `MAX_HELD_TOKENS` ids it is sent as it is.
    """

    __slots__ = ("_context", "_held", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = list(context)  # ids whose text was sent, kept because they shape the text of later ids
        self._held: list[int] = []

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.decode_token, token_ids))

    def decode_token(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        waits = not text or text.endswith(_INCOMPLETE)
        if waits and len(self._held) < MAX_HELD_TOKENS:
            return ""
        if text:  # ids without text shape nothing, and would push ids with text out of the context
            self._context = (self._context + self._held)[-_CONTEXT_TOKENS:]
        self._held = []
        return text

    def flush(self) -> str:
        return self._new_text().rstrip(_INCOMPLETE)

    def _new_text(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)
