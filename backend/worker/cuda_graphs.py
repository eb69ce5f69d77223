"""Graphs of whole steps, from staged numbers to logits: the host launches one thing, not every kernel by itself."""

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from backend.scheduler.batch import Batch
from backend.worker.device_stream import Graph, Work
from backend.worker.graph_shapes import GraphShapes, StepShape


class StepGraphs:
    """The graphs of one decoder. Made before the first request; a step only replays them."""

    def __init__(
        self,
        shapes: GraphShapes,
        capture: Callable[[Work], Graph],
        compute: Callable[[StepShape], object],
        logits: Tensor,
    ) -> None:
        """`compute` computes a step of the shape it is told, up to the rows of `logits` that sample."""
        started = time.perf_counter()
        self._shapes = shapes
        self._logits = logits  # [max_num_seqs, vocab]
        self._graphs = {shape: capture(partial(compute, shape)) for shape in shapes}
        self.seconds = time.perf_counter() - started  # that making them took

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_for(self, batch: Batch) -> StepShape | None:
        """That of the graph which computes the batch; None where none does."""
        return self._shapes.holding(batch)

    def replay(self, shape: StepShape) -> Tensor:
        """The logits [max_num_seqs, vocab] of the step that is staged, a row for each that samples.

        The next step overwrites them.
        """
        self._graphs[shape].replay()
        return self._logits
