"""The host's record, by slot, of how the slot's sequence is sampled."""

import numpy as np
import numpy.typing as npt

from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence

Integers = npt.NDArray[np.int64]

_NEVER = 2**63 - 1  # a position that no sequence reaches


class SlotSampling:
    """A value of every sampling parameter for every slot; 0 and 1 mean off, as in `SamplingParams`."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.penalised = np.zeros(max_num_seqs, np.bool_)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self._free_from = np.zeros(max_num_seqs, np.int64)  # position from which end tokens are allowed
        self._end_tokens: list[tuple[int, ...]] = [()] * max_num_seqs

    def fill_slot(self, admitted: NewSequence) -> None:
        """Record that a sequence takes the slot; the state of its former sequence is forgotten."""
        slot, sampling = admitted.slot, admitted.sampling
        self.temperature[slot] = 0 if sampling.greedy else sampling.temperature
        self.seed[slot] = admitted.seed
        self.min_p[slot] = sampling.min_p
        self.top_k[slot] = min(max(0, sampling.top_k), self._vocab_size)  # a device counts it in 32 bits
        self.top_p[slot] = sampling.top_p
        self.penalised[slot] = sampling.penalised
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self._free_from[slot] = min(admitted.num_prompt_tokens + sampling.min_tokens, _NEVER)
        self._end_tokens[slot] = self._endings(sampling)

    def forbidden(self, slots: Integers, positions: Integers) -> list[tuple[int, int]]:
        """Return rows and the end tokens that they may not draw yet; row i samples for `slots[i]` at `positions[i]`."""
        early = (positions < self._free_from[slots]).nonzero()[0]
        return [(row, token) for row in early.tolist() for token in self._end_tokens[slots[row]]]

    def _endings(self, sampling: SamplingParams) -> tuple[int, ...]:
        ids = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos_token_ids)
        return tuple(token for token in ids if token < self._vocab_size)
