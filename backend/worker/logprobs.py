"""Log probabilities of tokens, of the model's own logits: before temperature, penalties, biases and masks.

Only rows that ask are scored. For sampled rows the log-softmax is taken before the sampler changes their logits, and
the requested entries are picked from it once their tokens are drawn. Prompts are scored at every position, in slices of
rows. PickedScores entries are copied to pinned memory of the host without a wait.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from backend.scheduler.batch import Batch, NewSequence, PromptLogprobs, TokenLogprobs
from backend.worker.device_stream import on_device

SLICE_BYTES = 32 << 20  # of one slice of a prompt's logits, in fp32
COPIES_PER_SLICE = 3  # of a slice: in the decoder's type and in fp32, and their log-softmax

ComputeLogits = Callable[[Tensor], Tensor]
"""Returns logits [rows, vocab] fp32 for hidden states [rows, hidden]."""


class Scores:
    """The log probabilities of all tokens for some rows; picked entries take next to no memory."""

    def __init__(self, logits: Tensor, most: int) -> None:
        """Score `logits` [rows, vocab] fp32, which may change from then on, and find the `most` most likely tokens."""
        self._scores = logits.log_softmax(-1)
        self._above = torch.empty_like(self._scores, dtype=torch.bool)
        self._best = self._scores.topk(most) if most else None

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log probabilities of `tokens` [rows], and then of the most likely, [rows, 1 + most] fp32; and the
        ranks of `tokens`, and then the most likely, [rows, 1 + most] int64.
        """
        chosen = self._scores.gather(1, tokens.unsqueeze(1))
        above = torch.gt(self._scores, chosen, out=self._above)
        ranks = above.sum(1, keepdim=True, dtype=torch.int32).long() + 1
        if self._best is None:
            return chosen, ranks
        return torch.cat((chosen, self._best.values), 1), torch.cat((ranks, self._best.indices), 1)


@dataclass(slots=True)
class PickedScores:
    """PickedScores log probabilities of some rows, on their way to the host."""

    values: Tensor  # [rows, 1 + most] fp32
    numbers: Tensor  # [rows, 1 + most] int64

    @classmethod
    def room(cls, rows: int, most: int, pinned: bool) -> "PickedScores":
        shape = (rows, 1 + most)
        return cls(
            torch.empty(shape, dtype=torch.float32, pin_memory=pinned),
            torch.empty(shape, dtype=torch.int64, pin_memory=pinned),
        )

    def copy_rows(self, first: int, values: Tensor, numbers: Tensor) -> None:
        """Copy rows from a device to the places from `first` on; the host does not wait."""
        places = slice(first, first + len(values))
        self.values[places].copy_(values, non_blocking=True)
        self.numbers[places].copy_(numbers, non_blocking=True)

    def read(self, counts: list[int]) -> Iterator[TokenLogprobs]:
        """Yield each row with the number of most likely tokens that it asked for."""
        for values, numbers, count in zip(self.values.tolist(), self.numbers.tolist(), counts, strict=True):
            yield TokenLogprobs(values[0], numbers[0], numbers[1 : 1 + count], values[1 : 1 + count])


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The positions of one prompt that a step scores."""

    slot: int
    start: int  # position of the first token that is scored
    row: int  # of the step's hidden states, of the token before it
    token_ids: list[int]
    count: int  # of the most likely tokens at each position


@dataclass(slots=True)
class StepLogprobs:
    """The rows and parts of prompts that one step scores."""

    device: torch.device
    vocab_size: int
    rows: list[int]  # of the step's logits
    counts: list[int]  # of the most likely tokens that each row asks for
    parts: list[PromptPart]
    _scores: Scores | None = None
    _of_rows: PickedScores | None = None
    _of_parts: list[PickedScores] = field(default_factory=list)

    def score_prompts(self, hidden: Tensor, compute_logits: ComputeLogits) -> None:
        """Score the prompts' tokens by `hidden` [tokens, hidden], the step's final hidden states."""
        most_rows = max(1, SLICE_BYTES // (4 * self.vocab_size))
        for part in self.parts:
            picked = self._room(len(part.token_ids), part.count)
            tokens = on_device(part.token_ids, torch.int64, self.device)
            for first in range(0, len(part.token_ids), most_rows):
                rows = slice(first, min(first + most_rows, len(part.token_ids)))
                logits = compute_logits(hidden[part.row + rows.start : part.row + rows.stop])
                picked.copy_rows(first, *Scores(logits, self._most(part.count)).of(tokens[rows]))
            self._of_parts.append(picked)

    def score(self, logits: Tensor) -> None:
        """Score the rows that ask by `logits` [rows, vocab] as they are now."""
        if self.rows:
            most = max(self.counts)
            asking = logits if len(self.rows) == len(logits) else logits[on_device(self.rows, torch.int64, self.device)]
            self._scores, self._of_rows = Scores(asking, self._most(most)), self._room(len(self.rows), most)

    def pick(self, tokens: Tensor) -> None:
        """Pick the requested scores, now that `tokens` [rows of the step] are drawn."""
        if self._scores is not None and self._of_rows is not None:
            chosen = tokens if len(self.rows) == len(tokens) else tokens[on_device(self.rows, torch.int64, self.device)]
            self._of_rows.copy_rows(0, *self._scores.of(chosen))
            self._scores = None

    def read(self) -> tuple[dict[int, TokenLogprobs] | None, list[PromptLogprobs] | None]:
        """Return the log probabilities by row, and by part of a prompt, of a completed step."""
        rows = prompts = None
        if self._of_rows is not None:
            rows = dict(zip(self.rows, self._of_rows.read(self.counts), strict=True))
        if self.parts:
            pairs = zip(self.parts, self._of_parts, strict=True)
            prompts = [
                PromptLogprobs(part.slot, part.start, [*picked.read([part.count] * len(part.token_ids))])
                for part, picked in pairs
            ]
        return rows, prompts

    def _most(self, count: int) -> int:
        return min(count, self.vocab_size)

    def _room(self, rows: int, count: int) -> PickedScores:
        return PickedScores.room(rows, self._most(count), pinned=self.device.type == "cuda")


class AskedLogprobs:
    """The host's record, by slot, of the log probabilities that are asked for."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[int, int] = {}  # of the most likely tokens
        self._prompts: dict[int, NewSequence] = {}

    def fill_slot(self, admitted: NewSequence) -> None:
        """Record that a sequence takes the slot; the state of its former sequence is forgotten.

        The prompt of a sequence that has sampled before is scored up to its last position.
        """
        slot, sampling = admitted.slot, admitted.sampling
        self._counts.pop(slot, None)
        self._prompts.pop(slot, None)
        if sampling.logprobs is not None:
            self._counts[slot] = sampling.logprobs
        if sampling.prompt_logprobs is not None and len(admitted.token_ids) == admitted.num_prompt_tokens:
            self._prompts[slot] = admitted

    def of(self, batch: Batch) -> StepLogprobs | None:
        """Return the rows that a step is to score; None if there are none."""
        slots = batch.drawn_slots if self._counts else []
        rows = [row for row, slot in enumerate(slots) if slot in self._counts]
        parts = [*self._parts(batch)] if self._prompts and batch.num_decodes < len(batch.slots) else []
        if not rows and not parts:
            return None
        counts = [self._counts[slots[row]] for row in rows]
        return StepLogprobs(self._device, self._vocab_size, rows, counts, parts)

    def _parts(self, batch: Batch) -> Iterator[PromptPart]:
        """Yield the parts of prompts in the batch: the hidden state of a token scores the token behind it."""
        firsts = accumulate(batch.lengths, initial=0)
        for slot, start, length, row in zip(batch.slots, batch.starts, batch.lengths, firsts, strict=False):
            if (asked := self._prompts.get(slot)) is not None:
                stop = min(start + length + 1, asked.num_prompt_tokens)
                count = asked.sampling.prompt_logprobs
                if start + 1 < stop and count is not None:
                    yield PromptPart(slot, start + 1, row, asked.token_ids[start + 1 : stop], count)
