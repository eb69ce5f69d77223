"""Says in a few numbers of what form a conversation is, by which the lengths of answers are predicted.

A chat template begins and ends all prompts alike, so that the tokens at their ends tell little. What tells more is the
instruction that an application puts before each, who has spoken how often, and how the last message begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

LOOKED_AT = 256  # characters of an instruction, and of how a message begins
WORDS = 2  # at the beginning of the last message
MOST_MESSAGES = 8  # that are told apart by their number

_ROLES, _INSTRUCTION, _WORD, _WORDS, _LENGTH = range(5)


def form_of(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Returns numbers of 32 bits, from which no text can be read; () of no messages. O(`LOOKED_AT`)."""
    if not messages:
        return ()
    first, last = messages[0], messages[-1]
    text = _text(last)
    words = text[:LOOKED_AT].lower().split(maxsplit=WORDS)[:WORDS]
    found = [
        _hashed(_ROLES, f"{first.get('role')} {last.get('role')} {min(len(messages), MOST_MESSAGES)}"),
        _hashed(_LENGTH, f"{len(text).bit_length()}"),
        *[_hashed(_WORD, word) for word in words[:1]],
        *[_hashed(_WORDS, " ".join(words)) for _ in words[1:]],
    ]
    if first.get("role") in ("system", "developer"):
        found.append(_hashed(_INSTRUCTION, _text(first)[:LOOKED_AT]))
    return tuple(found)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _hashed(kind: int, text: str) -> int:
    return crc32(text.encode("utf-8", "surrogatepass"), kind)
