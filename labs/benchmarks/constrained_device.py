"""A simulated device whose rows follow scripts, beside real grammar processes.

As on a GPU, the forward pass of a step is launched at once, and sampling once the masks are there: the masks of a step
are requested when the tokens of the previous step are known, while the device computes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.kernels.ops import Ops
from backend.scheduler.batch import Batch, StepOutput
from backend.structured_output.masks import TokenMasks
from backend.worker.constrained_step import ConstrainedStep, MaskBuffers
from backend.worker.device_stream import CpuStream
from backend.worker.model_runner import MASK_WAIT_SHARE_OF_STEP


@dataclass(slots=True)
class MaskReader:
    """Stands for the mask kernel: checks that each mask allows the scripted token of its row."""

    tokens: list[int]

    def apply_token_bitmask(self, logits: Tensor, bitmasks: Tensor, indices: Tensor) -> None:
        del logits
        for token, index in zip(self.tokens, indices.tolist(), strict=True):
            if index >= 0:
                assert int(bitmasks[index, token // 32]) >> token % 32 & 1, "a mask forbids what an instance says next"


@dataclass(slots=True)
class SimulatedStep:
    """A step with its place on the device's timeline, in seconds of `time.perf_counter`."""

    output: StepOutput
    slots: list[int]  # that sample
    masks: TokenMasks
    constrained: ConstrainedStep | None = None
    behind: ConstrainedStep | None = None  # of the step behind it
    done_at: float = 0.0

    def wait(self) -> StepOutput:
        self.note_tokens()
        if self.constrained is not None:
            self.constrained.complete(self.output)
        if self.behind is not None:
            self.behind.foretell(self.output, self.slots, MASK_WAIT_SHARE_OF_STEP * self.output.elapsed)
        return self.output

    def note_tokens(self) -> None:
        """Wait until it is done, and have its tokens known to the step behind it."""
        delay = self.done_at - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        self.masks.sampled(torch.tensor(self.slots).numpy(), torch.tensor(self.output.token_ids).numpy())


@dataclass(slots=True)
class ConstrainedDevice:
    """Runs steps one after the other in real time; each takes as long as it is told."""

    masks: TokenMasks
    config: EngineConfig
    scripts: list[list[int]]  # a sequence says that of the number which is its seed, modulo as many
    step_time: Callable[[Batch], float]
    runs_ahead: bool = True
    busy: float = 0.0  # seconds
    _said: dict[int, tuple[list[int], int]] = field(default_factory=dict)  # by slot, with the length of its prompt
    _free_at: float = 0.0
    _last: SimulatedStep | None = None

    def launch(self, batch: Batch) -> SimulatedStep:
        for admitted in batch.admitted:
            self.masks.fill_slot(admitted)
            said = self.scripts[admitted.seed % len(self.scripts)]
            self._said[admitted.slot] = said, admitted.num_prompt_tokens
        rows, slots = self.masks.rows_of(batch), batch.sampled_slots
        tokens = [self._token(slot, batch.starts[row] + batch.lengths[row]) for row, slot in self._sampling(batch)]
        elapsed, before = self.step_time(batch), self._last
        computed = max(self._free_at, time.perf_counter()) + elapsed
        step = self._last = SimulatedStep(StepOutput(batch.step, tokens, elapsed), slots, self.masks)
        if rows is not None:
            buffers = MaskBuffers(self.config, 0, CpuStream())
            step.constrained = ConstrainedStep(rows, self.masks, buffers, before.note_tokens if before else _nothing)
            if before is not None and step.constrained.may_jump:
                before.behind = step.constrained
            step.constrained.ask()
            step.constrained.constrain(torch.empty(len(tokens), 0), cast("Ops", MaskReader(tokens)))
        self.busy += elapsed
        self._free_at = step.done_at = max(computed, time.perf_counter())
        return step

    @staticmethod
    def _sampling(batch: Batch) -> list[tuple[int, int]]:
        return list(zip(batch.sampled, batch.sampled_slots, strict=True))

    def _token(self, slot: int, position: int) -> int:
        said, num_prompt = self._said[slot]
        return said[min(position - num_prompt, len(said) - 1)]


def _nothing() -> None:
    pass
