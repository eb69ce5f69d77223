"""Token ids on their way between an HTTP worker and the engine's process: 32-bit numbers, made and read a few thousand
at a time, since the ids of a long prompt would hold an event loop for tens of milliseconds.
"""

import asyncio
from array import array
from collections.abc import Sequence

TOKENS_PER_TURN = 8192  # under a millisecond
_BYTES = array("I").itemsize


async def pack(prompts: Sequence[Sequence[int]]) -> bytes:
    """Return the ids of all prompts, one after another."""
    packed, room = array("I"), TOKENS_PER_TURN
    for prompt in prompts:
        start = 0
        while start < len(prompt):
            if not room:
                await asyncio.sleep(0)
                room = TOKENS_PER_TURN
            part = prompt[start : start + room]
            packed.extend(part)
            start, room = start + len(part), room - len(part)
    return packed.tobytes()


async def unpack(packed: bytes, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    """Append to each of the prompts its next `length` ids."""
    start, room = 0, TOKENS_PER_TURN
    for prompt, length in zip(prompts, lengths, strict=True):
        end = start + length
        while start < end:
            if not room:
                await asyncio.sleep(0)
                room = TOKENS_PER_TURN
            count = min(end - start, room)
            prompt.extend(array("I", packed[_BYTES * start : _BYTES * (start + count)]))
            start, room = start + count, room - count
