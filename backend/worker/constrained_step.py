"""A step with rows that have a grammar: their masks are filled while the step computes, and applied to its logits."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.kernels.ops import Ops
from backend.scheduler.batch import NO_TOKEN_ALLOWED, StepOutput
from backend.structured_output.masks import ConstrainedRow, Masks, TokenMasks
from backend.worker.staging import Staged

Newest = Callable[[list[int]], list[int]]
"""Returns what slots have sampled last, for which it may wait."""


def _nothing(_: list[int]) -> list[int]:
    return []


class NewestTokens:
    """Keeps on the host what each slot has sampled last, while any slot has a grammar.

    Where steps run ahead, whoever launches one waits for the step before it, as another thread does.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._tokens: npt.NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)

    def sampled(self, staged: Staged) -> None:
        """Take note of the tokens of a step that is done, before its memory is used for another."""
        count = staged.num_sampled
        self._tokens[staged.piece.numbers.sampled_slots[:count]] = staged.piece.tokens[:count].numpy()

    def of(self, slots: Sequence[int]) -> list[int]:
        tokens: list[int] = self._tokens[slots].tolist()
        return tokens


class MaskBuffers:
    """Memory for masks on their way to a device, one for each step that may be in flight; on a CPU there is none."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._device = device
        self._num_seqs = config.max_num_seqs
        self._pinned: list[Tensor] = []
        self._count = config.steps_in_flight

    def place(self, masks: Masks, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return masks [masks, words] and the mask of each row [rows] int32, -1 where it has none, on the device."""
        indices = torch.full((num_rows,), -1, dtype=torch.int32)
        rows = list(masks.slots)
        if self._device.type == "cpu":
            indices[rows] = torch.tensor(list(masks.slots.values()), dtype=torch.int32)
            return masks.words, indices
        indices[rows] = torch.arange(len(rows), dtype=torch.int32)
        if len(self._pinned) < self._count:
            size = (self._num_seqs, masks.words.shape[1])
            self._pinned.append(torch.empty(size, dtype=torch.int32, pin_memory=True))
        else:
            self._pinned.append(self._pinned.pop(0))
        words = torch.index_select(
            masks.words, 0, torch.tensor(list(masks.slots.values())), out=self._pinned[-1][: len(rows)]
        )
        move: dict[str, Any] = {"device": self._device, "non_blocking": True}
        return words.to(**move), indices.pin_memory().to(**move)


class ConstrainedStep:
    """The rows of one step that have a grammar, from its launch to its output."""

    def __init__(self, rows: list[ConstrainedRow], masks: TokenMasks, buffers: MaskBuffers, newest: Newest) -> None:
        self._rows, self._masks, self._buffers, self._newest = rows, masks, buffers, newest
        self._taken: Masks | None = None

    def ask(self) -> None:
        """Ask for the masks, once the tokens are known that the step computes."""
        self._masks.ask(self._rows, self._newest)
        self._rows, self._newest = [], _nothing  # which refer to the step before

    def constrain(self, logits: Tensor, ops: Ops) -> None:
        """Wait for the masks, and forbid in `logits` [rows, vocab] fp32 what they do not allow."""
        self._taken = self._masks.answer()
        if self._taken.slots:
            ops.apply_token_bitmask(logits, *self._buffers.place(self._taken, len(logits)))

    def complete(self, output: StepOutput) -> None:
        """Write into a step's output what came of the masks."""
        if self._taken is None:
            return
        for row in self._taken.failed:
            output.token_ids[row] = NO_TOKEN_ALLOWED
        forced = {row: tokens for row, tokens in self._taken.forced.items() if output.token_ids[row] >= 0}
        output.forced = forced or None
