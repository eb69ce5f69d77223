"""The shapes of graphs, few enough to be recorded before the first request.

A batch runs in the smallest shape that holds it, padded. A place without a sequence costs programs that end at once,
and a row of the logits' product; a padding token costs a row of every other product. Decodes alone are padded by at
most 7 rows or a quarter, steps with prompts by at most 127 or a quarter: up to some 200 rows, reading the weights takes
longer than multiplying with them. A step that fills the token budget is not padded.

No shape holds a step of more than `MAX_PROMPTS` prompts, or of more than `MAX_TOKENS` tokens, which takes a device
longer than the host needs to launch it kernel by kernel.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import add
from typing import Self

from backend.config import EngineConfig
from backend.scheduler.batch import Batch

MAX_PROMPTS = 16
MAX_TOKENS = 8192
MIN_DECODE_PLACES = 64  # for decodes beside prompts
FINE_SIZE_STEP, COARSE_SIZE_STEP = 8, 64  # differences between sizes of decodes alone, up to and beyond FINE_UNTIL_SEQS
FINE_UNTIL_SEQS = 256
TOKENS_STEP = 128  # between sizes of steps with prompts, or a quarter of the power of two below


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: its numbers of sequences and tokens, padding included.

    Places of sequences are padded part by part: `num_decodes` places of one token each, then `num_prompts`; a place
    that is left has no tokens. Tokens follow each other without a gap, and padding comes after all of them.
    """

    num_decodes: int
    num_prompts: int
    num_tokens: int
    max_query_len: int
    max_context_len: int
    has_adapters: bool = False  # some sequence may have one

    @classmethod
    def of(cls, batch: Batch, has_adapters: bool = False) -> Self:
        """Return the shape of a batch without padding."""
        return cls(
            num_decodes=batch.num_decodes,
            num_prompts=len(batch.slots) - batch.num_decodes,
            num_tokens=sum(batch.lengths),
            max_query_len=max(batch.lengths),
            max_context_len=max(map(add, batch.starts, batch.lengths)),
            has_adapters=has_adapters,
        )

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_prompts


def largest(max_num_batched_tokens: int) -> int:
    return min(max_num_batched_tokens, MAX_TOKENS)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of decodes alone: 1, 2, 4, then multiples of 8, beyond 256 of 64, and `max_num_seqs` itself."""
    sizes = [
        1,
        2,
        4,
        *range(FINE_SIZE_STEP, FINE_UNTIL_SEQS + 1, FINE_SIZE_STEP),
        *range(FINE_UNTIL_SEQS + COARSE_SIZE_STEP, max_num_seqs, COARSE_SIZE_STEP),
    ]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def place_sizes(max_num_seqs: int) -> list[int]:
    """Return the places for decodes beside prompts: none, then powers of two from 64, and `max_num_seqs` itself."""
    sizes, size = [0], MIN_DECODE_PLACES
    while size < max_num_seqs:
        sizes.append(size)
        size *= 2
    return [*sizes, max_num_seqs]


def token_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the sizes of steps with prompts: multiples of 128, beyond 1,024 four to an octave, up to the most that a
    step may have, or `MAX_TOKENS`.
    """
    most, sizes, size = largest(max_num_batched_tokens), [], 0
    while size < most:
        size = min(most, size + max(TOKENS_STEP, (1 << size.bit_length()) // 8))
        sizes.append(size)
    return sizes


def num_shapes(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Return an upper bound on the number of an engine's shapes, tight to a few."""
    with_prompts = len(token_sizes(max_num_batched_tokens)) * len(place_sizes(max_num_seqs))
    return with_prompts + len(decode_sizes(max_num_seqs))


class GraphShapes:
    """The shapes of one engine's graphs."""

    def __init__(self, config: EngineConfig) -> None:
        self._decodes = decode_sizes(config.max_num_seqs)
        self._places = place_sizes(config.max_num_seqs)
        self._tokens = token_sizes(config.max_num_batched_tokens)
        self._num_prompts = min(MAX_PROMPTS, config.max_num_seqs)
        self._max_context_len = config.max_model_len
        self._adapts = (True, False) if config.max_adapter_rank else (False,)

    def __iter__(self) -> Iterator[StepShape]:
        """Yield the shapes, the largest first, so that the others' graphs fit the memory of its graph. An engine with
        adapters has each with them and without, which launches fewer kernels.
        """
        sizes = list(product(reversed(self._tokens), reversed(self._places)))
        for has_adapters in self._adapts:
            shapes = (self._with_prompts(places, tokens) for tokens, places in sizes)
            yield from (replace(shape, has_adapters=has_adapters) for shape in dict.fromkeys(shapes))
        decodes = [self._decodes_alone(size) for size in reversed(self._decodes)]
        yield from (replace(shape, has_adapters=one) for one in self._adapts for shape in decodes)

    def holding(self, batch: Batch, has_adapters: bool = False) -> StepShape | None:
        """Return the smallest shape that holds the batch and computes logits for all sampled rows; None if none
        does.
        """
        shape = self._holding(batch)
        return replace(shape, has_adapters=True) if shape is not None and has_adapters else shape

    def _holding(self, batch: Batch) -> StepShape | None:
        num_seqs, num_tokens = len(batch.slots), sum(batch.lengths)
        if batch.num_decodes == num_seqs:
            return self._decodes_alone(_at_least(num_seqs, self._decodes))
        num_places = batch.num_decodes
        # with forks more sequences sample than have rows
        if (lacking := len(batch.sampled) - self._num_prompts) > num_places:
            num_places, num_tokens = lacking, max(num_tokens, lacking + 1)
        if num_seqs - batch.num_decodes > self._num_prompts or num_tokens > self._tokens[-1]:
            return None
        return self._with_prompts(_at_least(num_places, self._places), _at_least(num_tokens, self._tokens))

    def _decodes_alone(self, size: int) -> StepShape:
        return StepShape(size, 0, size, 1, self._max_context_len)

    def _with_prompts(self, places: int, tokens: int) -> StepShape:
        """Return a shape with prompts: one token at least is a prompt's, so places of decodes never exceed rows."""
        return StepShape(min(places, tokens - 1), self._num_prompts, tokens, tokens, self._max_context_len)


def _at_least(number: int, sizes: list[int]) -> int:
    return sizes[bisect_left(sizes, number)]
