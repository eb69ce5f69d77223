"""A step whose rows have grammars: their masks are filled while the step computes, and applied to its logits."""

import threading
from array import array
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.kernels.ops import Ops
from backend.scheduler.batch import NO_TOKEN_ALLOWED, StepOutput
from backend.structured_output.masks import ConstrainedRows, Masks, TokenMasks
from backend.worker.device_stream import DeviceStream
from backend.worker.logits_processors import WORD_BITS


class MaskBuffers:
    """Memory for masks on their way to a device, allocated before the first request; on a CPU there is none.

    The host has a piece for each step that may be in flight; on the device steps follow one another.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, stream: DeviceStream) -> None:
        shape, device = (config.max_num_seqs, -(-vocab_size // WORD_BITS)), stream.device
        self._is_copied = device.type != "cpu"
        if self._is_copied:
            self._pieces = deque(
                (_ints(stream, shape[0] * shape[1]).view(shape), _ints(stream, config.max_sampled_tokens))
                for _ in range(config.steps_in_flight)
            )
            self._masks = torch.zeros(shape, dtype=torch.int32, device=device)
            self._rows = torch.zeros(config.max_sampled_tokens, dtype=torch.int32, device=device)

    def place(self, masks: Masks, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return masks [masks, words] and the index of each row's mask [rows] int32, -1 for none, on the device."""
        indices, slots = [-1] * num_rows, list(masks.slots.values())
        for row, mask in zip(masks.slots, range(len(slots)) if self._is_copied else slots, strict=True):
            indices[row] = mask
        row_masks = torch.frombuffer(array("i", indices), dtype=torch.int32)
        if not self._is_copied:
            return masks.words, row_masks
        self._pieces.rotate(1)
        words, rows = self._pieces[0][0][: len(slots)], self._pieces[0][1][:num_rows]
        torch.index_select(masks.words, 0, torch.tensor(slots), out=words)
        rows.copy_(row_masks)
        return (
            self._masks[: len(slots)].copy_(words, non_blocking=True),
            self._rows[:num_rows].copy_(rows, non_blocking=True),
        )


def _ints(stream: DeviceStream, count: int) -> Tensor:
    return stream.staging(4 * count).view(torch.int32)


class ConstrainedStep:
    """The rows of one step that have a grammar, from its launch to its output.

    If steps run ahead, one thread launches it while another waits for the step before.
    """

    def __init__(
        self, rows: ConstrainedRows, masks: TokenMasks, buffers: MaskBuffers, before: Callable[[], object]
    ) -> None:
        """`before` returns once `TokenMasks.sampled` has the tokens of the step before."""
        self.may_jump = rows.may_jump
        self._masks, self._buffers = masks, buffers
        self._pending: tuple[ConstrainedRows, Callable[[], object]] | None = rows, before
        self._following = [row[:2] for row in rows.asked if row[-1]]  # rows whose newest token the step before sampled
        self._taken: Masks | None = None
        self._is_settled = threading.Event()

    def ask(self) -> None:
        """Ask for the masks, once the tokens that the step computes are known."""
        assert self._pending is not None
        rows, before = self._pending
        self._pending = None  # it refers to the step before
        before()
        self._masks.ask(rows)

    def constrain(self, logits: Tensor, ops: Ops) -> None:
        """Wait for the masks, and forbid in `logits` [rows, vocab] fp32 the tokens that they do not allow."""
        self._taken = self._masks.answer()
        self.release_waiter()
        if self._taken.slots:
            ops.apply_token_bitmask(logits, *self._buffers.place(self._taken, len(logits)))

    def release_waiter(self) -> None:
        """Release the thread that waits for masks, whether or not they have come."""
        self._is_settled.set()

    def foretell(self, output: StepOutput, slots: list[int], patience: float) -> None:
        """Write the forced tokens after the tokens that `slots` have sampled into the output of the step before.

        The masks of this step tell them, while it computes the first of them: told now, the next step computes all the
        others. Masks that do not come within `patience` seconds are not waited for: this step's output tells them
        instead.
        """
        if not self._is_settled.wait(patience) or self._taken is None or not self._taken.forced:
            return
        sampled = {slot: index for index, slot in enumerate(slots)}
        rows = [(sampled[slot], self._taken.forced.get(row)) for row, slot in self._following if slot in sampled]
        told = {index: tokens for index, tokens in rows if tokens and output.token_ids[index] >= 0}
        output.forced = {**(output.forced or {}), **told} or None

    def complete(self, output: StepOutput) -> None:
        """Write the result of the masks into a step's output."""
        if self._taken is None:
            return
        for row in self._taken.failed:
            output.token_ids[row] = NO_TOKEN_ALLOWED
        for row, slot in self._taken.slots.items():
            if output.token_ids[row] == NO_TOKEN_ALLOWED and (end := self._masks.only_end(slot)) is not None:
                output.token_ids[row] = end  # even where `min_tokens` forbids the end: no other token may follow
        forced = {row: tokens[1:] for row, tokens in self._taken.forced.items() if output.token_ids[row] >= 0}
        output.forced = forced or None
