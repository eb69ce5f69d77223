"""Penalties apply to tokens that a sequence already holds, which are counted where they are sampled."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.scheduler.batch import NewSequence
from backend.worker.device_stream import on_device
from backend.worker.slot_sampling import SlotSampling


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalised rows of one step, and the state behind them."""

    state: "PenaltyState"
    arrived: list[NewSequence]  # whose tokens are counted before the step's
    rows: Tensor  # [n] int64, rows of the step's logits
    slots: Tensor  # [n] int64, their slots
    presence: Tensor | None  # [n, 1] fp32, subtracted once for a token in the output; None: all 0
    frequency: Tensor | None  # [n, 1] fp32, subtracted for each occurrence; None: all 0
    repetition: Tensor | None  # [n, 1] fp32, see `repeat`; None: all 1

    def apply(self, logits: Tensor) -> None:
        """Penalise `logits` [rows, vocab] in place."""
        self.state.load(self.arrived)
        held_tokens = self.state.occurrences
        counts = held_tokens.output_counts[self.slots]
        penalised = logits[self.rows]
        if self.repetition is not None:
            held = (counts > 0) | held_tokens.in_prompt[self.slots]
            penalised = torch.where(held, repeat(penalised, self.repetition), penalised)
        if self.frequency is not None:
            penalised -= self.frequency * counts
        if self.presence is not None:
            penalised -= self.presence * (counts > 0)
        logits[self.rows] = penalised

    def count(self, tokens: Tensor) -> None:
        """Count each row's sampled token, [rows of the step]."""
        self.state.occurrences.output_counts[self.slots, tokens[self.rows]] += 1


def repeat(logits: Tensor, penalty: Tensor) -> Tensor:
    """Penalise logits of tokens in prompt or output: divided above 0, multiplied below (Keskar et al., 2019)."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The tokens that each slot's sequence holds."""

    in_prompt: Tensor  # [max_num_seqs, vocab] bool
    output_counts: Tensor  # [max_num_seqs, vocab] int32


class PenaltyState:
    """Keeps the tokens that penalised sequences hold, by slot; 5 bytes a slot and token, allocated when needed."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | None = None) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device or torch.device("cpu")
        self._arrived: dict[int, NewSequence] = {}  # by slot: others may take it before it samples
        self._occurrences: Occurrences | None = None

    @property
    def occurrences(self) -> Occurrences:
        if self._occurrences is None:
            in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._occurrences = Occurrences(in_prompt, output_counts)
        return self._occurrences

    def fill_slot(self, admitted: NewSequence) -> None:
        """Record that a penalised sequence takes a slot. The device counts its tokens before the slot's first
        sample.
        """
        self._arrived[admitted.slot] = admitted

    def take_arrived(self) -> list[NewSequence]:
        """Return the newest sequence of each slot that was admitted since the last call, for `load`."""
        arrived, self._arrived = [*self._arrived.values()], {}
        return arrived

    def load(self, arrived: list[NewSequence]) -> None:
        """Start the counts of slots from their sequences' present tokens. The host waits for nothing."""
        for admitted in arrived:
            tokens = on_device(admitted.token_ids, torch.int64, self._device)
            prompt, output = tokens[: admitted.num_prompt_tokens], tokens[admitted.num_prompt_tokens :]
            self.occurrences.in_prompt[admitted.slot].zero_().index_fill_(0, prompt, True)
            counts = self.occurrences.output_counts[admitted.slot].zero_()
            counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def select(self, slots: npt.NDArray[np.int64], known: SlotSampling, device: torch.device) -> Penalties | None:
        """Return the penalised rows of a step, one for each of `slots`; None if there are none."""
        rows = known.penalised[slots].nonzero()[0]
        if len(rows) == 0:
            return None
        chosen = slots[rows]
        return Penalties(
            state=self,
            arrived=self.take_arrived(),
            rows=torch.from_numpy(rows).to(device),
            slots=torch.from_numpy(chosen).to(device),
            presence=_column(known.presence[chosen], 0, device),
            frequency=_column(known.frequency[chosen], 0, device),
            repetition=_column(known.repetition[chosen], 1, device),
        )


def _column(strengths: npt.NDArray[np.float32], off: float, device: torch.device) -> Tensor | None:
    return None if bool((strengths == off).all()) else torch.from_numpy(strengths).to(device).unsqueeze(1)
