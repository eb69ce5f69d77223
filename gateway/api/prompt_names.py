"""Names the blocks of prompts as they arrive: by their names the engine finds cached blocks."""

import asyncio
from collections.abc import Collection, Iterable
from functools import lru_cache

from backend.paged_kv.block_names import BlockNames, Tokens
from backend.scheduler.sequence import Sequence

BLOCKS_AT_ONCE, TOKENS_AT_ONCE = 128, 2048  # what takes a quarter of a millisecond, in which the event loop is held
MAX_ROOTS = 1024  # that are remembered, of a tenant or of a salt of its clients


class PromptNames:
    """Writes `cache_root` and `block_names` of sequences that have not arrived yet."""

    def __init__(self, names: BlockNames, block_size: int) -> None:
        self._names = names
        self._block_size = block_size
        self._at_once = max(1, min(BLOCKS_AT_ONCE, TOKENS_AT_ONCE // block_size))
        self._root = lru_cache(MAX_ROOTS)(names.root)

    def begin(self, sequences: Iterable[Tokens], scope: str, salt: str | None) -> None:
        """Say who may share the blocks of these sequences: all of the scope; with a salt, those of the scope that have
        the same.
        """
        root = self._root(scope) if salt is None else self._root(scope, salt)
        for sequence in sequences:
            sequence.cache_root = root

    def begin_apart(self, sequences: Iterable[Sequence], scope: str) -> None:
        """Say that nobody shares the blocks of these sequences but the answers to one prompt: it is computed for them,
        and no part of it found, so that all of its log probabilities are there.
        """
        for sequence in sequences:
            sequence.cache_root = self._names.root(scope, "", sequence.prompt_group or sequence.id)

    async def name(self, sequences: Collection[Tokens]) -> None:
        """Name the blocks of their prompts: of short ones at once, of others between what else the event loop does."""
        have_names = self.name_some(sequences)
        while not have_names:
            await asyncio.sleep(0)
            have_names = self.name_some(sequences)

    def name_some(self, sequences: Iterable[Tokens]) -> bool:
        """Name the next full blocks of their prompts, up to `BLOCKS_AT_ONCE` and `TOKENS_AT_ONCE`; returns whether all
        have names now.
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
