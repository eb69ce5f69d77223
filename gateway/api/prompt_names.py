"""Names the blocks of prompts as they arrive: by their names the engine finds cached blocks."""

import asyncio
from collections.abc import Collection, Iterable
from functools import lru_cache

from backend.adapter import Adapter
from backend.paged_kv.block_names import BlockNames, Tokens, adapter_salt
from backend.scheduler.sequence import Sequence

BLOCKS_PER_TURN, TOKENS_PER_TURN = 128, 2048  # hashed in one callback, a quarter of a millisecond
MAX_ROOTS = 1024  # cached; one for each tenant and salt


class PromptNames:
    """Writes `cache_root` and `block_names` of sequences that have not arrived yet."""

    def __init__(self, names: BlockNames, block_size: int) -> None:
        self._names = names
        self._block_size = block_size
        self._at_once = max(1, min(BLOCKS_PER_TURN, TOKENS_PER_TURN // block_size))
        self._root = lru_cache(MAX_ROOTS)(names.root)

    def begin(self, sequences: Iterable[Tokens], scope: str, salt: str | None, adapter: Adapter | None = None) -> None:
        """Set the root under which the blocks of these sequences are shared: the scope's, or the root of scope, salt
        and adapter.
        """
        adapted = adapter_salt(None if adapter is None else adapter.digest)
        root = self._root(scope, *(() if salt is None else (salt,)), *adapted)
        for sequence in sequences:
            sequence.cache_root = root

    def begin_apart(self, sequences: Iterable[Sequence], scope: str) -> None:
        """Give these sequences a root of their own, shared by the answers to one prompt alone: nothing of the prompt is
        found in the cache, so that all of its log probabilities are computed.
        """
        for sequence in sequences:
            sequence.cache_root = self._names.root(scope, "", sequence.prompt_group or sequence.id)

    async def name(self, sequences: Collection[Tokens]) -> None:
        """Name the blocks of the prompts, yielding to the event loop between slices of long ones."""
        have_names = self.name_some(sequences)
        while not have_names:
            await asyncio.sleep(0)
            have_names = self.name_some(sequences)

    def name_some(self, sequences: Iterable[Tokens]) -> bool:
        """Name the next full blocks of the prompts, up to `BLOCKS_PER_TURN` and `TOKENS_PER_TURN`; returns True once
        all are named.
        """
        room, size = self._at_once, self._block_size
        for sequence in sequences:
            named, full = len(sequence.block_names), sequence.num_prompt_tokens // size
            if named < full:
                if room == 0:
                    return False
                self._names.name(sequence, min(full, named + room))
                room -= len(sequence.block_names) - named
                if len(sequence.block_names) < full:
                    return False
        return True
