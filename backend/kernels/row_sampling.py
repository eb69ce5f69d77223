"""How the rows of one step's logits are sampled, as tensors on the device: what a kernel that samples is told."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each row is sampled, on the device."""

    temperature: Tensor  # [rows] fp32, 0: greedy
    min_p: Tensor  # [rows] fp32, 0: off
    top_k: Tensor  # [rows] int32, 0: off
    top_p: Tensor  # [rows] fp32, 1: off
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, of the sampled tokens in their sequences
    some_min_p: bool = True  # whether any row has it, as far as the host knows: what none has takes no time
    some_top_k: bool = True
    some_top_p: bool = True


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """The penalties of each row (0, 0 and 1: none), and what its slot's sequence holds; see `backend.penalties`."""

    slots: Tensor  # [rows] int64, no two equal
    presence: Tensor  # [rows] fp32
    frequency: Tensor  # [rows] fp32
    repetition: Tensor  # [rows] fp32
    in_prompt: Tensor  # [slots, vocab] bool
    output_counts: Tensor  # [slots, vocab] int32, counts the sampled token of a penalised row


SampleRows = Callable[[Tensor, RowSampling, RowPenalties | None], Tensor]
"""Token ids [rows] int64 for logits [rows, vocab] fp32, which it may write to, without an answer the host waits for."""
