"""Digests of the beginnings of a prompt, under a secret of the fleet: a router needs no tokenizer, and its knowledge of
a cache reveals nothing about any prompt.

A prompt is taken as the bytes of its body from the messages on, the plain prompt or the input: the next turn of a
conversation begins with the same bytes. A digest covers one block of `BLOCK_BYTES` and the digest before it, so that
prompts with the same beginning share its digests, wherever a message ends. Nothing is parsed, so no body can keep a
router busy.
"""

from hashlib import blake2b

BLOCK_BYTES = 512
MAX_BLOCKS = 512  # the first 256 KiB of a prompt
DIGEST_BYTES = 12


def prompt_bytes(body: bytes) -> bytes:
    """The part of a body from which its prompt is digested; empty without a prompt."""
    starts = (body.find(name) for name in (b'"messages"', b'"prompt"', b'"input"'))
    start = next((start for start in starts if start > 0), None)
    return b"" if start is None else body[start:]


def beginnings(text: bytes, scope: str, secret: bytes) -> tuple[bytes, ...]:
    """The digests of a text's beginnings, for the `scope` that shares the cache."""
    digest, found = scope.encode("utf-8", "surrogatepass"), []
    for end in range(BLOCK_BYTES, min(len(text), BLOCK_BYTES * MAX_BLOCKS) + 1, BLOCK_BYTES):
        block = len(digest).to_bytes(2) + digest + text[end - BLOCK_BYTES : end]
        digest = blake2b(block, key=secret, digest_size=DIGEST_BYTES).digest()
        found.append(digest)
    return tuple(found)
