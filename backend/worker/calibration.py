"""Calibration steps as batches: rows, slots and blocks of steps that run only to be timed.

They run while no sequence has a slot. They read the blocks' present contents and store nothing; a slot is initialised
again when a sequence takes it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import itemgetter

from backend.calibration_steps import SERIES_RATIO, CalibrationStep, Series
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence

REPEATS_PER_SHAPE = 5  # of each shape, if there is time
TOKEN_STRIDE = 7919  # between token ids: other tokens choose other experts
CALIBRATION_READ_BYTES = (
    64 * 2**20
)  # keys and values read on a CPU, more than its caches hold: other pages stay untouched

Measured = list[tuple[CalibrationStep, float]]
"""Calibration steps and the seconds that each took."""


def batch_of(
    step: CalibrationStep,
    config: EngineConfig,
    num_blocks: int,
    adapters: Sequence[tuple[int, list[int]]] = (),
    vocab_size: int = 1,
) -> Batch:
    """Return the step's batch, with step number 0. It reads the first `num_blocks` blocks, each once while there are
    enough. Its decodes sample from the whole vocabulary. Its rows have these `adapters`, the later ones none,
    and its tokens are spread over a vocabulary of `vocab_size`.
    """
    decodes, rows = step.num_decodes, step.num_decodes + step.num_prefills
    starts = [step.context - 1] * decodes + [step.start] * step.num_prefills
    lengths = [1] * decodes + [step.length] * step.num_prefills
    tables, first = [], 0
    for slot, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        width = config.blocks_for(start + length)
        tables.append((slot, 0, [(first + index) % num_blocks for index in range(width)]))
        first += width
    # no state of the slots' former sequences is left
    adapted = chain(adapters, repeat(None))
    admitted = [NewSequence(slot, SamplingParams(), 0, [0], 1, next(adapted)) for slot in range(rows)]
    sampled, token_ids = list(range(decodes)), [n * TOKEN_STRIDE % vocab_size for n in range(sum(lengths))]
    batch = Batch(0, decodes, list(range(rows)), starts, lengths, token_ids, sampled, tables, admitted, stores=False)
    if config.window_groups:
        for (slot, _, blocks), start in zip(tables, starts, strict=True):
            place = config.first_seen(start)
            count = (len(blocks) - place) * config.window_groups
            batch.window_blocks.append((slot, place, [(first + index) % num_blocks for index in range(count)]))
            first += count
    return batch


def measure(
    series: Sequence[Series],
    run: Callable[[CalibrationStep], float],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Run calibration steps for about `seconds`; return the time of each, as `run` returned it.

    Series advance in turn, so that a slow device has some steps of each kind. A series ends where its next step might
    exceed the time. The remaining time goes to repeats, the shortest first.
    """
    until = clock() + seconds
    measured: Measured = []
    begun = deque((iter(steps), 0.0) for steps in series)
    while begun:
        steps, before = begun.popleft()
        step = next(steps, None)
        if step is not None and clock() + SERIES_RATIO * before < until:
            took = run(step)
            measured.append((step, took))
            begun.append((steps, took))
    for step, took in sorted(measured, key=itemgetter(1)) * (REPEATS_PER_SHAPE - 1):
        if clock() + took < until:
            measured.append((step, run(step)))
    return measured
