"""Graphs of decode-only steps, one for each of a few batch sizes; a batch runs in the next larger one, padded."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from backend.lane import Graph, Work

FINE, COARSE = 8, 64  # steps between sizes, up to and beyond FINE_UNTIL
FINE_UNTIL = 256


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then multiples of 8, beyond 256 of 64, and `max_num_seqs` itself, so that little is padding."""
    sizes = [1, 2, 4, *range(FINE, FINE_UNTIL + 1, FINE), *range(FINE_UNTIL + COARSE, max_num_seqs, COARSE)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """The graphs of one decoder. Made before the first request; a step only replays them."""

    def __init__(self, capture: Callable[[Work], Graph], decode: Callable[[int], object], logits: Tensor) -> None:
        """`decode` computes a step of as many rows as it is told to, from staged numbers to the rows of `logits`.

        The largest comes first, so that the others fit the memory that it takes.
        """
        self._logits = logits  # [max_num_seqs, vocab]
        self._sizes = graph_sizes(len(logits))
        self._graphs = {size: capture(partial(decode, size)) for size in reversed(self._sizes)}

    def size_for(self, num_seqs: int) -> int:
        """Rows of the smallest graph that holds `num_seqs`."""
        return next(size for size in self._sizes if size >= num_seqs)

    def replay(self, size: int) -> Tensor:
        """The logits [size, vocab] of the step that is staged; the next step overwrites them."""
        self._graphs[size].replay()
        return self._logits[:size]
