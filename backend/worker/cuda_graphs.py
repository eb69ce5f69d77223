"""CUDA graphs of whole steps, from staged numbers to logits: the host launches one graph instead of every kernel."""

import logging
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from backend.scheduler.batch import Batch
from backend.worker.device_stream import DeviceStream, Graph, Work
from backend.worker.graph_shapes import GraphShapes, StepShape

log = logging.getLogger(__name__)


class StepGraphs:
    """The graphs of one decoder, recorded before the first request; a step only replays them."""

    def __init__(
        self,
        shapes: GraphShapes,
        device_stream: DeviceStream,
        compute: Callable[[StepShape], object],
        logits: Tensor,
    ) -> None:
        """Record a graph of every shape. `compute` computes a step of a shape, up to the `logits` of its sampled rows.

        Raises the errors of torch and CUDA.
        """
        started = time.perf_counter()
        self._shapes = shapes
        self._logits = logits  # [max_num_seqs, vocab]
        self._graphs = {shape: _record(device_stream, partial(compute, shape)) for shape in shapes}
        self.seconds = time.perf_counter() - started  # that recording took
        log.info("recorded graphs of %d kinds of steps in %.1f s", len(self), self.seconds)

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_for(self, batch: Batch, has_adapters: bool = False) -> StepShape | None:
        """Return the shape of the graph that computes the batch; None if none does."""
        return self._shapes.holding(batch, has_adapters)

    def replay(self, shape: StepShape) -> Tensor:
        """Replay the staged step; returns its logits [max_num_seqs, vocab], one row for each row that samples.

        The next step overwrites them.
        """
        self._graphs[shape].replay()
        return self._logits


def _record(device_stream: DeviceStream, work: Work) -> Graph:
    """Record work as a graph. It runs once before, because a graph cannot hold the loading of libraries at a size's
    first use, and is replayed once after, because CUDA sends a graph to the device at its first launch.
    """
    device_stream.launch(work).synchronize()
    graph = device_stream.capture(work)
    device_stream.launch(graph.replay).synchronize()
    return graph
