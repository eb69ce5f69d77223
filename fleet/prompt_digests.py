"""Digests of the beginnings of a prompt, under a secret of the fleet: the router needs no tokenizer, and what it keeps
or is told of a cache says nothing of any prompt.

A prompt is taken as one text: the tools, then each message's role and content; or the plain prompt. Beginnings are
those of whole blocks of `BLOCK` bytes, each digest that of the one before and its block, so that prompts with the same
beginning share the digests of it, wherever a message ends.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson

BLOCK = 512  # bytes
MAX_BLOCKS = 512  # a prompt goes by its first 256 KiB
DIGEST_BYTES = 12


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """Return the text of a request's prompt; of what is not valid, whatever it has."""
    messages = body.get("messages")
    if isinstance(messages, list):
        head = orjson.dumps(tools) if (tools := body.get("tools")) else b""
        return b"\0".join([head, *_words(messages)])
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return orjson.dumps(prompt) if prompt else b""


def _words(messages: list[Any]) -> Iterator[bytes]:
    for message in messages:
        if isinstance(message, dict):
            for value in (message.get("role"), message.get("content"), message.get("tool_calls")):
                yield value.encode("utf-8", "surrogatepass") if isinstance(value, str) else orjson.dumps(value)


def beginnings(text: bytes, scope: str, secret: bytes) -> tuple[bytes, ...]:
    """Return the digests of a text's beginnings, for those who share the cache: the `scope`."""
    digest, found = scope.encode("utf-8", "surrogatepass"), []
    for end in range(BLOCK, min(len(text), BLOCK * MAX_BLOCKS) + 1, BLOCK):
        block = len(digest).to_bytes(2) + digest + text[end - BLOCK : end]
        digest = blake2b(block, key=secret, digest_size=DIGEST_BYTES).digest()
        found.append(digest)
    return tuple(found)
