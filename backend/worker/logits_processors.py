"""Rules of a request that change its row's logits before a token is drawn: a bias, allowed tokens, bad words.

A slot's allowed tokens and its bad words of one token are a mask of bits. A bad word of several tokens forbids its last
token where the newest tokens of the output are its others; the newest tokens are kept on the device, because the host
may not know them yet. Tokens beyond the vocabulary are ignored.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.kernels.ops import Ops
from backend.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from backend.scheduler.batch import NO_TOKEN_ALLOWED, NewSequence
from backend.worker.device_stream import on_device

HISTORY_TOKENS = MAX_BAD_WORD_TOKENS - 1  # newest tokens of an output that a bad word can end
WORD_BITS = 32
_ANY, _NONE = -1, -2  # in the beginning of a bad word; in an output that has no token yet


@dataclass(frozen=True, slots=True)
class SlotRules:
    """The rules of one slot's sequence, on the device. None: the sequence has no rule of the kind."""

    admitted: NewSequence
    bitmask: Tensor | None  # [words] int32
    bias: tuple[Tensor, Tensor] | None  # token ids [n] int64, and the biases of their logits [n] fp32
    bad_words: tuple[Tensor, Tensor] | None  # their beginnings [n, tokens] int64, `_ANY` in front; their ends [n] int64


class LogitsProcessors:
    """Keeps the rules of every slot; the masks and the newest tokens on the device, allocated before any request."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, ops: Ops) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rules: dict[int, SlotRules] = {}
        self._arrived: dict[int, SlotRules] = {}  # by slot: others may take it before it samples
        self._has_rules: npt.NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        words = -(-vocab_size // WORD_BITS)
        self.apply_token_bitmask = ops.apply_token_bitmask
        self.bitmasks = torch.zeros((max_num_seqs, words), dtype=torch.int32, device=device)
        self.newest = torch.full((max_num_seqs, HISTORY_TOKENS), _NONE, dtype=torch.int64, device=device)

    def fill_slot(self, admitted: NewSequence) -> None:
        """Record that a sequence takes the slot; the state of its former sequence is forgotten."""
        slot, sampling = admitted.slot, admitted.sampling
        rules = self._rules_of(admitted) if _has_rules(sampling) else None
        self._has_rules[slot] = rules is not None
        if rules is not None:
            self._rules[slot] = rules
            self._arrived[slot] = rules

    def of(self, slots: npt.NDArray[np.int64]) -> "ProcessedRows | None":
        """Return the rules of a step's rows, one for each of `slots`; None if no row has any."""
        rows: list[int] = self._has_rules[slots].nonzero()[0].tolist()
        if not rows:
            return None
        arrived, self._arrived = [*self._arrived.values()], {}
        return ProcessedRows(self, arrived, {row: self._rules[slots[row]] for row in rows})

    def load(self, arrived: list[SlotRules]) -> None:
        """Initialise the state of slots from their masks and their sequences' tokens; the host waits for nothing."""
        for rules in arrived:
            slot, admitted = rules.admitted.slot, rules.admitted
            if rules.bitmask is not None:
                self.bitmasks[slot].copy_(rules.bitmask)
            if rules.bad_words is not None:
                output = admitted.token_ids[admitted.num_prompt_tokens :][-HISTORY_TOKENS:]
                self.newest[slot].copy_(self.on_device([_NONE] * (HISTORY_TOKENS - len(output)) + output, torch.int64))

    def on_device(self, numbers: object, dtype: torch.dtype) -> Tensor:
        return on_device(numbers, dtype, self._device)

    def _rules_of(self, admitted: NewSequence) -> SlotRules:
        sampling = admitted.sampling
        bias = [(token, value) for token, value in sampling.logit_bias if token < self._vocab_size]
        words = [word for word in sampling.bad_words if all(0 <= token < self._vocab_size for token in word)]
        longer = [word for word in words if len(word) > 1]
        return SlotRules(
            admitted,
            self._bitmask(sampling, [word[0] for word in words if len(word) == 1]),
            self._pair([token for token, _ in bias], [value for _, value in bias], torch.float32) if bias else None,
            self._pair([word[-1] for word in longer], _beginnings(longer), torch.int64) if longer else None,
        )

    def _pair(self, tokens: list[int], others: object, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.on_device(tokens, torch.int64), self.on_device(others, dtype)

    def _bitmask(self, sampling: SamplingParams, forbidden: list[int]) -> Tensor | None:
        if sampling.allowed_token_ids is None and not forbidden:
            return None
        bits = np.ones(self.bitmasks.shape[1] * WORD_BITS, np.uint8)
        if sampling.allowed_token_ids is not None:
            allowed = np.array(sampling.allowed_token_ids, np.int64)
            bits[:] = 0
            bits[allowed[allowed < self._vocab_size]] = 1
        bits[forbidden] = 0
        return self.on_device(np.packbits(bits, bitorder="little").view(np.int32), torch.int32)


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The rows of one step that have rules."""

    processors: LogitsProcessors
    arrived: list[SlotRules]  # whose state is loaded before the step's rows
    rows: dict[int, SlotRules]  # by row of the step's logits

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [rows, vocab] in place: masks, then bad words, then biases."""
        known = self.processors
        known.load(self.arrived)
        indices = [-1] * len(logits)
        for row, rules in self.rows.items():
            if rules.bitmask is not None:
                indices[row] = rules.admitted.slot
        if any(index >= 0 for index in indices):
            known.apply_token_bitmask(logits, known.bitmasks, known.on_device(indices, torch.int32))
        for row, rules in self.rows.items():
            if rules.bad_words is not None:
                ends, beginnings = rules.bad_words
                newest = known.newest[rules.admitted.slot, HISTORY_TOKENS - beginnings.shape[1] :]
                are_next = ((beginnings == newest) | (beginnings == _ANY)).all(1)
                most = torch.where(are_next, -torch.inf, torch.inf).to(logits.dtype)
                logits[row].scatter_reduce_(0, ends, most, "amin")
            if rules.bias is not None:
                logits[row].index_add_(0, *rules.bias)

    def count(self, tokens: Tensor) -> None:
        """Append each row's sampled token, [rows of the step], to the newest tokens of its output."""
        known = self.processors
        counted = {row: rules.admitted.slot for row, rules in self.rows.items() if rules.bad_words is not None}
        if counted:
            rows = known.on_device(list(counted), torch.int64)
            slots = known.on_device(list(counted.values()), torch.int64)
            kept = known.newest[slots, 1:]
            known.newest.index_copy_(0, slots, torch.cat((kept, tokens[rows].unsqueeze(1)), 1))


def where_allowed(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return `tokens` [rows] drawn from `logits` [rows, vocab], but `NO_TOKEN_ALLOWED` where every token was
    forbidden.
    """
    drawn = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.where(drawn != -torch.inf, NO_TOKEN_ALLOWED)


def _has_rules(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias or sampling.bad_words) or sampling.allowed_token_ids is not None


def _beginnings(words: list[tuple[int, ...]]) -> list[list[int]]:
    """Return all tokens but the last of each word, padded to one length."""
    most = max(map(len, words)) - 1
    return [[_ANY] * (most - len(word) + 1) + [*word[:-1]] for word in words]
