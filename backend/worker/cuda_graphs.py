"""CUDA graphs hold whole steps, from staged numbers to logits: the host launches one graph, not every kernel."""

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from backend.scheduler.batch import Batch
from backend.worker.device_stream import Graph, Work
from backend.worker.graph_shapes import GraphShapes, StepShape


class StepGraphs:
    """The graphs of one decoder are made before the first request; a step only replays them."""

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
        """Return the shape of the graph that computes the batch; None where none does."""
        return self._shapes.holding(batch)

    def replay(self, shape: StepShape) -> Tensor:
        """Replay the step that is staged; returns its logits [max_num_seqs, vocab], a row for each row that samples.

        The next step overwrites them.
        """
        self._graphs[shape].replay()
        return self._logits
