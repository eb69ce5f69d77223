"""Penalties on tokens that a sequence already holds, counted where the tokens are sampled."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.batch import Admitted


@dataclass(frozen=True, slots=True)
class Penalties:
    """One step's penalised rows, and the state behind them."""

    state: "Occurrences"
    rows: Tensor  # [n] int64, rows of the step's logits
    slots: Tensor  # [n] int64, their slots
    presence: Tensor | None  # [n, 1] fp32, subtracted once from what the output holds; None: all 0
    frequency: Tensor | None  # [n, 1] fp32, subtracted for each time; None: all 0
    repetition: Tensor | None  # [n, 1] fp32, see `repeat`; None: all 1

    def apply(self, logits: Tensor) -> None:
        """Penalise `logits` [rows, vocab] in place."""
        counts = self.state.output_counts[self.slots]
        penalised = logits[self.rows]
        if self.repetition is not None:
            held = (counts > 0) | self.state.in_prompt[self.slots]
            penalised = torch.where(held, repeat(penalised, self.repetition), penalised)
        if self.frequency is not None:
            penalised -= self.frequency * counts
        if self.presence is not None:
            penalised -= self.presence * (counts > 0)
        logits[self.rows] = penalised

    def count(self, tokens: Tensor) -> None:
        """Count each row's sampled token, [rows of the step]."""
        self.state.output_counts[self.slots, tokens[self.rows]] += 1


def repeat(logits: Tensor, penalty: Tensor) -> Tensor:
    """Logits of tokens the sequence holds, prompt included: divided above 0, multiplied below (Keskar et al., 2019)."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


@dataclass(frozen=True, slots=True)
class Occurrences:
    """What each slot's sequence holds."""

    in_prompt: Tensor  # [max_num_seqs, vocab] bool
    output_counts: Tensor  # [max_num_seqs, vocab] int32


class PenaltyState:
    """The penalties of every slot. Its tensors, 5 bytes a slot and token, are made when a request first needs them."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | None = None) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device or torch.device("cpu")
        self._strengths = np.zeros((3, max_num_seqs), np.float32)
        self._occurrences: Occurrences | None = None

    def admit(self, admitted: Admitted) -> None:
        """Start the slot's counts from the tokens the sequence already has."""
        sampling, slot = admitted.sampling, admitted.slot
        strengths = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        self._strengths[:, slot] = strengths
        if self._occurrences is None:
            self._occurrences = self._allocate()
        tokens = torch.tensor(admitted.token_ids, dtype=torch.int64, device=self._device)
        prompt, output = tokens[: admitted.num_prompt_tokens], tokens[admitted.num_prompt_tokens :]
        vocab_size = self._shape[1]
        self._occurrences.in_prompt[slot] = prompt.bincount(minlength=vocab_size) > 0
        self._occurrences.output_counts[slot] = output.bincount(minlength=vocab_size).int()

    def select(
        self, slots: npt.NDArray[np.int64], penalised: npt.NDArray[np.bool_], device: torch.device
    ) -> Penalties | None:
        """The rows of a step, one for each of `slots`, whose slot is `penalised` [max_num_seqs]; None if none is."""
        rows = penalised[slots].nonzero()[0]
        if len(rows) == 0:
            return None
        assert self._occurrences is not None
        chosen = slots[rows]
        presence, frequency, repetition = self._strengths[:, chosen]
        return Penalties(
            state=self._occurrences,
            rows=torch.from_numpy(rows).to(device),
            slots=torch.from_numpy(chosen).to(device),
            presence=_column(presence, 0, device),
            frequency=_column(frequency, 0, device),
            repetition=_column(repetition, 1, device),
        )

    def _allocate(self) -> Occurrences:
        in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return Occurrences(in_prompt, output_counts)


def _column(strengths: npt.NDArray[np.float32], off: float, device: torch.device) -> Tensor | None:
    return None if bool((strengths == off).all()) else torch.from_numpy(strengths).to(device).unsqueeze(1)
