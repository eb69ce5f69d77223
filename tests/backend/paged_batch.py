"""Drives a Decoder without an engine: sequences that share a paged pool whose blocks are dealt in shuffled order."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from backend.kernels.ops import StepInputs
from backend.model.decoder import Decoder
from backend.paged_kv.kv_cache import KVCache


class PagedBatch:
    """Prompts being served. Block tables differ in width and interleave, as in a busy pool."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], block_size: int = 4) -> None:
        self.decoder = decoder
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        self.blocks: list[list[int]] = [[] for _ in prompts]
        self.block_size = block_size
        self.free = list(range(128))
        random.Random(0).shuffle(self.free)
        self.kv = KVCache(decoder.config, 128, block_size, decoder.embedding.dtype, decoder.embedding.device)

    def step(self, rows: dict[int, int]) -> Tensor:
        """Compute `rows[s]` more tokens of each sequence s; logits of all of them [T, vocab]."""
        inputs = self._inputs(rows)
        for sequence, count in rows.items():
            self.computed[sequence] += count
        return self.decoder.logits(self.decoder.forward(inputs, self.kv))

    def greedy(self, num_tokens: int, chunk: int, starts: Sequence[int]) -> list[list[int]]:
        """`num_tokens` greedy tokens of each sequence, sequence s joining at step `starts[s]`, prompts in chunks."""
        lengths = [len(tokens) + num_tokens for tokens in self.tokens]
        prompts = [len(tokens) for tokens in self.tokens]
        now = 0
        while any(len(tokens) < length for tokens, length in zip(self.tokens, lengths, strict=True)):
            active = [s for s, start in enumerate(starts) if start <= now and len(self.tokens[s]) < lengths[s]]
            rows = {s: min(chunk, len(self.tokens[s]) - self.computed[s]) for s in active}
            logits = self.step(rows) if rows else torch.empty(0, 0)
            for (s, _), last in zip(rows.items(), torch.tensor(list(rows.values())).cumsum(0) - 1, strict=True):
                if self.computed[s] == len(self.tokens[s]):
                    self.tokens[s].append(int(logits[last].argmax()))
            now += 1
        return [tokens[prompt:] for tokens, prompt in zip(self.tokens, prompts, strict=True)]

    def _inputs(self, rows: dict[int, int]) -> StepInputs:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start, context_lens = [0], []
        for s, count in rows.items():
            start, stop = self.computed[s], self.computed[s] + count
            while len(self.blocks[s]) * self.block_size < stop:
                self.blocks[s].append(self.free.pop())
            ids += self.tokens[s][start:stop]
            positions += range(start, stop)
            slots += [
                self.blocks[s][p // self.block_size] * self.block_size + p % self.block_size for p in range(start, stop)
            ]
            query_start.append(len(ids))
            context_lens.append(stop)
        width = max(len(self.blocks[s]) for s in rows)
        tables = [self.blocks[s] + [0] * (width - len(self.blocks[s])) for s in rows]
        return StepInputs(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            num_seqs=len(rows),
            max_query_len=max(rows.values()),
            max_context_len=max(context_lens),
        )
