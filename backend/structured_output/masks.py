"""The device's side of constrained rows: it asks the matching processes for a step's masks, and reads them.

A matching process may fail: it is killed when it takes too long, or ends when it takes too much memory. The row that it
was working on then ends, and a successor makes the matchers of the other rows again from their outputs in shared
memory. A step's question is a few numbers, because the device waits for its answer.
"""

import logging
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.errors import GrammarInvalid
from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.structured_output.frames import RowStatus, StepAnswer, receive_answer
from backend.structured_output.process_setup import MAX_FORCED_TOKENS, ProcessSetup
from backend.structured_output.processes import GrammarProcesses, MatchingProcess, NoGrammarProcess

log = logging.getLogger(__name__)

# of a step's question, if no row is to blame for the failures; and as often its grammars are compiled again
_ATTEMPTS = 4


ConstrainedRow = tuple[int, int, int, int, int]
"""A row of a step whose grammar is asked for the next token's mask: its place in `Batch.sampled`, its slot, the place
in the slot's output where its tokens start, the length of the output with them, and 1 if the last of them is the newest
token that the slot has sampled.
"""


Chunk = tuple[int, int, list[int]]
"""A row's part of an output: its slot, the place of the first of the tokens, and the tokens."""


@dataclass(slots=True)
class ConstrainedRows:
    """The rows of a step that have a grammar."""

    asked: list[ConstrainedRow]
    chunks: list[Chunk]  # of the rows that are no decodes, whether they are asked for or not
    may_jump: bool  # True if forced tokens of any row may be taken before they are sampled


@dataclass(slots=True)
class Masks:
    """The masks of a step's constrained rows."""

    slots: dict[int, int]  # the mask's slot, by row in `Batch.sampled`
    words: Tensor  # [slots, words] int32, in memory that the next step writes to; bit t % 32 of word t // 32 is token t
    failed: list[int] = field(default_factory=list)  # rows in `Batch.sampled` for which no token is allowed
    # by row, the forced tokens; the first of them is sampled
    forced: dict[int, list[int]] = field(default_factory=dict)


class _ConstrainedSlot(NamedTuple):
    """The sequence in a slot."""

    grammar: Grammar
    num_prompt_tokens: int
    may_jump: bool  # forced tokens may be taken before they are sampled
    process: int  # the index of its matching process


class _Shared:
    """The memory shared with the processes, as `SharedLayout` divides it."""

    def __init__(self, memory: Any, setup: ProcessSetup) -> None:
        layout, seqs, words = setup.layout, setup.max_num_seqs, np.frombuffer(memory, np.int32)
        self.nanoseconds = words[: layout.masks].view(np.int64)
        self.masks = torch.from_numpy(words[layout.masks : layout.newest].reshape(seqs, -1))
        self.newest, self.statuses, self.num_forced = words[layout.newest : layout.forced].reshape(3, seqs)
        self.forced = words[layout.forced : layout.working_on].reshape(seqs, MAX_FORCED_TOKENS)
        self.working_on = words[layout.working_on : layout.questions]
        self.questions = words[layout.questions : layout.outputs].reshape(-1, layout.question_ints)
        self.outputs = words[layout.outputs :].reshape(seqs, -1)


class TokenMasks:
    """Asks for masks and reads them. The thread that runs steps owns it; any thread may read its counts."""

    def __init__(self, processes: GrammarProcesses, jump_forward: bool = True) -> None:
        self.processes = processes
        self.jump_forward = jump_forward
        self.num_rows = 0  # rows that had a mask
        self.num_failures = 0  # rows that failed
        self._memory: _Shared | None = None  # None: no slot has had a grammar
        self._slots: dict[int, _ConstrainedSlot] = {}
        self._new: set[int] = set()  # slots that their matching process has not been told of
        self._number = 0  # of the newest question
        self._asked: dict[int, list[ConstrainedRow]] = {}  # by process
        self._told: dict[int, MatchingProcess] = {}

    def fill_slot(self, admitted: NewSequence) -> None:
        """Record that a sequence takes the slot; the state of its former sequence is forgotten."""
        sampling, slot, num_prompt = admitted.sampling, admitted.slot, admitted.num_prompt_tokens
        self._slots.pop(slot, None)
        if (grammar := sampling.grammar) is not None:
            may_jump = self.jump_forward and sampling.logprobs is None and not _depends_on_samples(sampling)
            self._slots[slot] = _ConstrainedSlot(grammar, num_prompt, may_jump, self.processes.index_of(grammar))
            self._new.add(slot)
            self._extend(slot, 0, admitted.token_ids[num_prompt:])
            self.processes.mask_time.fill_slot(slot, grammar.owner)

    def sampled(self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Write the tokens that slots have sampled to shared memory, before the next step asks about them."""
        if self._memory is not None:
            self._memory.newest[slots] = tokens

    def rows_of(self, batch: Batch) -> ConstrainedRows | None:
        """Return the rows of a batch whose grammars are asked when the batch runs; None if there are none."""
        known, starts, lengths, first = self._slots, batch.starts, batch.lengths, batch.num_decodes
        if not known:
            return None
        sampled = list(zip(batch.sampled, batch.sampled_slots, strict=True))
        asked: list[ConstrainedRow] = [
            (row, slot, start := starts[row] - known[slot].num_prompt_tokens, start + 1, 1)
            for row, slot in sampled[:first]
            if slot in known
        ]
        chunks, end = list[Chunk](), 0
        for sample, (row, slot) in enumerate(sampled[first:], first):
            if slot in known:
                start = starts[row] - known[slot].num_prompt_tokens
                asked.append((sample, slot, max(0, start), max(0, start + lengths[row]), 0))
        for row in range(first, len(batch.slots)):
            slot, end = batch.slots[row], end + lengths[row]
            if slot in known:
                start = starts[row] - known[slot].num_prompt_tokens
                if tokens := batch.token_ids[end - lengths[row] + max(0, -start) : end]:
                    chunks.append((slot, max(0, start), tokens))
        may_jump = any(known[slot].may_jump for _, slot, *_ in asked)
        return ConstrainedRows(asked, chunks, may_jump) if asked or chunks else None

    def ask(self, rows: ConstrainedRows) -> None:
        """Ask for the masks of a step, once the newest tokens of its decoding slots are known."""
        for chunk in rows.chunks:
            self._extend(*chunk)
        self._number = (self._number + 1) % 2**31
        self._asked = {}
        for row in rows.asked:
            self._asked.setdefault(self._slots[row[1]].process, []).append(row)
        for index, asked in self._asked.items():
            self._send(index, asked)

    def answer(self) -> Masks:
        """Wait for the masks that were asked for, and return them."""
        masks = Masks({}, self._shared.masks)
        for index, asked in self._asked.items():
            masks.slots.update([row[:2] for row in asked])
            self._receive(index, asked, masks)
        self.num_rows += len(masks.slots)
        self.num_failures += len(masks.failed)
        for row in masks.failed:
            del masks.slots[row]
        return masks

    def only_end(self, slot: int) -> int | None:
        """Return the end token if the slot's last mask allows no other token: its output matches and cannot go on. None
        otherwise.
        """
        words, end_tokens = self._shared.masks[slot].numpy().view(np.uint32), self.processes.setup.end_tokens
        places = words.nonzero()[0].tolist()
        if len(places) > len(end_tokens):
            return None
        allowed = [32 * place + bit for place in places for bit in range(32) if int(words[place]) >> bit & 1]
        return allowed[0] if allowed and set(allowed) <= set(end_tokens) else None

    @property
    def _shared(self) -> _Shared:
        if self._memory is None:
            self._memory = _Shared(self.processes.memory.bytes, self.processes.setup)
            self.processes.mask_time.nanoseconds = self._memory.nanoseconds
        return self._memory

    def _extend(self, slot: int, start: int, tokens: list[int]) -> None:
        """Write these tokens to the slot's output, from `start` on."""
        shared = self._shared
        if tokens:
            shared.outputs[slot, start : start + len(tokens)] = tokens

    def _send(self, index: int, rows: list[ConstrainedRow]) -> None:
        """Ask a process, and tell it of new slots. If it is gone, or none can be started, `_receive` finds that out."""
        try:
            process = self.processes.matching(index)
        except (NoGrammarProcess, GrammarInvalid, OSError) as error:
            log.error("no grammar process can be had: %s", error)
            self._told.pop(index, None)
            return
        if self._told.get(index) is not process:
            self._told[index] = process
            self._new.update([slot for slot, known in self._slots.items() if known.process == index])
        new = [slot for _, slot, *_ in rows if slot in self._new] if self._new else []
        asked = array("i", (len(new), len(rows)))
        if new:
            rows = [(row[0], row[1], 0 if row[1] in new else row[2], row[3], row[4]) for row in rows]
        for slot in new:
            asked.append(slot)
            asked.frombytes(self._slots[slot].grammar.hash)
            asked.append(self._slots[slot].may_jump)
        asked.extend(chain.from_iterable(rows))
        self._new.difference_update(new)
        question = self._shared.questions[index]
        question[0] = -1  # the process may still read the question before, whose answer was not awaited
        question[1 : len(asked) + 1] = asked
        question[0] = self._number
        with suppress(OSError, ValueError):
            process.ring()

    def _receive(self, index: int, rows: list[ConstrainedRow], masks: Masks) -> None:
        """Wait for a process's answer; if it fails, ask again for the rows that are left."""
        failures, rounds = 0, 0
        while rows:
            process = self._told.get(index)
            if process is None:
                masks.failed += [sample for sample, *_ in rows]
                return
            try:
                answer = receive_answer(process.steps, self._number)
            except (EOFError, OSError) as error:
                failures += 1
                rows = self._after_failure(index, process, rows, masks, error, failures)
            else:
                rows = self._take(process, answer, rows, masks)
                rounds += 1
                if rounds > 2 * _ATTEMPTS:
                    masks.failed += [sample for sample, *_ in rows]
                    return
            if rows:
                self._send(index, rows)

    def _after_failure(
        self,
        index: int,
        process: MatchingProcess,
        rows: list[ConstrainedRow],
        masks: Masks,
        error: Exception,
        failures: int,
    ) -> list[ConstrainedRow]:
        """Return the rows to ask for again: all but the row that the process was working on when it failed. A late
        process may have had no processor: a row is blamed for that at the second time.
        """
        is_excused = isinstance(error, BlockingIOError) and failures == 1
        blamed = -1 if is_excused else int(self._shared.working_on[index])
        self._shared.working_on[index] = -1
        log.error(
            "grammar process %d ends working on slot %d: %s", process.pid, blamed, str(error) or type(error).__name__
        )
        self.processes.discard(process)
        failed = [row for row in rows if row[1] == blamed or failures == _ATTEMPTS]
        masks.failed += [sample for sample, *_ in failed]
        return [row for row in rows if row not in failed]

    def _take(
        self, process: MatchingProcess, answer: StepAnswer, rows: list[ConstrainedRow], masks: Masks
    ) -> list[ConstrainedRow]:
        """Read an answer; returns the rows whose grammars the process did not know, and now does."""
        shared = self._shared
        if answer.num_jumping:
            counts: list[int] = shared.num_forced.tolist()
            for sample, slot, *_ in rows:
                if counts[slot] > 1:
                    masks.forced[sample] = shared.forced[slot, : counts[slot]].tolist()
        again = []
        for row in rows if answer.num_unmasked else ():
            sample, slot, *_ = row
            if shared.statuses[slot] == RowStatus.UNKNOWN:
                self._new.add(slot)
                try:
                    process.compile(self._slots[slot].grammar)
                except GrammarInvalid:
                    masks.failed.append(sample)
                    continue
                except (EOFError, OSError):
                    process.kill()
                again.append(row)
            elif shared.statuses[slot] != RowStatus.MASKED:
                masks.failed.append(sample)
        return again


def _depends_on_samples(sampling: SamplingParams) -> bool:
    """Return True if the next token's mask depends on more than the grammar, or if the device counts sampled tokens."""
    restricts = sampling.bad_words or sampling.allowed_token_ids is not None or sampling.min_tokens
    return sampling.penalised or bool(restricts)
