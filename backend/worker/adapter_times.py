"""Measures what adapters add to a step, before any other: tenants are charged by it."""

import time
from collections.abc import Callable

import torch

from backend.calibration_steps import CalibrationStep
from backend.config import EngineConfig
from backend.model.adapter_checkpoint import AdapterWeights, random_adapter
from backend.model.model_config import ModelConfig
from backend.scheduler.batch import Batch
from backend.worker.adapter_tables import AdapterTables
from backend.worker.calibration import batch_of

DECODES = 8  # of the measured step, each with an adapter of its own
PROMPT_TOKENS = 64  # of the measured chunk
MEASURED_SECONDS, FEWEST_RUNS = 0.2, 3  # of each kind of step
_NUMBER = 0  # of the measured adapter, and of no other


def measure_adapters(
    tables: AdapterTables, model: ModelConfig, config: EngineConfig, num_blocks: int, run: Callable[[Batch], float]
) -> tuple[float, float, float]:
    """Return the seconds that a block of an adapter adds to a step for each decode, for each token of a prompt, and to
    be brought to the device. `run` runs a step and returns its seconds. The first `num_blocks` blocks are used, which
    hold nothing of use yet.
    """
    rank = config.max_adapter_rank
    weights = random_adapter(model, tables.dtype, rank, rank, tables.block_numbers)
    size = len(weights.blocks)
    tables.add(_NUMBER, weights)

    def added(step: CalibrationStep) -> float:
        """Return the seconds that adapters add to a step, in the quickest of its runs."""
        rows = step.num_decodes + step.num_prefills
        of_rows = [(_NUMBER, [(row * size + at) % num_blocks for at in range(size)]) for row in range(rows)]
        with_adapters = batch_of(step, config, num_blocks, of_rows)
        without = batch_of(step, config, num_blocks)
        pairs, until = list[tuple[float, float]](), time.perf_counter() + MEASURED_SECONDS
        while len(pairs) < FEWEST_RUNS or time.perf_counter() < until:
            pairs.append((run(with_adapters), run(without)))
        return max(0.0, min(slow for slow, _ in pairs) - min(fast for _, fast in pairs))

    decodes = min(DECODES, config.max_num_seqs)
    tokens = min(PROMPT_TOKENS, config.max_num_batched_tokens, config.max_model_len - 1)
    of_decode = added(CalibrationStep(decodes, 1)) / (decodes * size)
    of_prompt = added(CalibrationStep(num_prefills=1, length=tokens)) / (tokens * size)
    bringing = _measure_copy(tables, weights, min(size, num_blocks))
    tables.remove(_NUMBER)
    return of_decode, of_prompt, bringing


def _measure_copy(tables: AdapterTables, weights: AdapterWeights, blocks: int) -> float:
    """Return the seconds of bringing one block."""
    bring = tables.copies(Batch(0, adapter_blocks=[(_NUMBER, index, index) for index in range(blocks)]))
    seconds = []
    for _ in range(FEWEST_RUNS):
        began = time.perf_counter()
        bring()
        if tables.device.type == "cuda":
            torch.cuda.synchronize(tables.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / len(weights.blocks[:blocks])
