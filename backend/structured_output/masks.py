"""The device's side of constrained rows: asks the processes that match for a step's masks, and takes them over.

Whoever matches can fail: it is killed when it takes too long, or ends when it takes too much memory. Then the row that
it was working on ends, and the others' matchers are made again in its successor from the tokens so far.
"""

import logging
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from backend.errors import GrammarInvalid
from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.structured_output.frames import Op, RowStatus, receive_frame, send_frame
from backend.structured_output.processes import GrammarProcesses, MatchingProcess

log = logging.getLogger(__name__)

STEP_SECONDS = 2.0  # that a process may take for the masks of a step, far beyond what the limits of its work allow
_ATTEMPTS = 4  # of a frame whose failures no row is to blame for, and as many to have its grammars known


@dataclass(slots=True, eq=False)
class SlotOutput:
    """The output of the sequence in a slot, as far as the host knows it, and how much of it its matcher has."""

    slot: int
    grammar: Grammar
    num_prompt_tokens: int
    may_jump: bool  # tokens that are forced may be taken before they are sampled
    tokens: list[int]
    matching: MatchingProcess | None = None  # that was told of it
    num_told: int = 0  # tokens

    def is_now(self, place: int, tokens: list[int]) -> None:
        """Take note that the output from `place` on is these tokens."""
        if self.tokens[place : place + len(tokens)] != tokens or len(self.tokens) != place + len(tokens):
            self.tokens[place:] = tokens
            self.num_told = min(self.num_told, place)


class ConstrainedRow(NamedTuple):
    """A row of a step whose grammar is asked which token may be sampled, or is told what its tokens are."""

    sample: int  # its place in `Batch.sampled`; -1: nothing is sampled behind it
    output: SlotOutput
    place: int  # in its output, of the first of its tokens; below 0: in the prompt
    tokens: list[int] | None  # that the row computes; None: the one that its slot sampled last


@dataclass(slots=True)
class Masks:
    """The masks of the rows of a step that are constrained."""

    slots: dict[int, int]  # by row in `Batch.sampled`, of those that have a mask
    words: Tensor  # [slots, words] int32, in memory that the next step writes to; bit t % 32 of word t // 32 is token t
    failed: list[int] = field(default_factory=list)  # of `Batch.sampled`, for which there is no token
    forced: dict[int, list[int]] = field(default_factory=dict)  # by the same, the tokens that follow the sampled one


class TokenMasks:
    """Keeps the output of each slot with a grammar. The thread that runs steps owns it, but for `num_failures`."""

    def __init__(self, processes: GrammarProcesses, jump_forward: bool = True) -> None:
        self.processes = processes
        self.jump_forward = jump_forward
        self.seconds = 0.0  # that matching has taken so far, in whichever processes
        self.num_rows = 0  # that had a mask
        self.num_failures = 0  # of rows
        self.is_used = False  # any slot has had a grammar
        self._memory: Tensor | None = None  # shared with the processes, int32
        self._slots: dict[int, SlotOutput] = {}
        self._number = 0  # of the question
        self._asked: dict[int, list[ConstrainedRow]] = {}  # by process
        self._sent: dict[int, MatchingProcess] = {}

    def admit(self, admitted: NewSequence) -> None:
        """Note that a sequence takes the slot; what the slot held before is forgotten."""
        sampling, slot, num_prompt = admitted.sampling, admitted.slot, admitted.num_prompt_tokens
        self._slots.pop(slot, None)
        if sampling.grammar is not None:
            may_jump = self.jump_forward and sampling.logprobs is None and not _depends_on_samples(sampling)
            output = admitted.token_ids[num_prompt:]
            self.is_used = True
            self._slots[slot] = SlotOutput(slot, sampling.grammar, num_prompt, may_jump, output)

    def rows_of(self, batch: Batch) -> list[ConstrainedRow]:
        """Return the rows of a batch that have a grammar, which is to be asked of when the batch runs."""
        known = self._slots
        if not known:
            return []
        rows, first, slots = [], batch.num_decodes, batch.sampled_slots
        for index, row in enumerate(batch.sampled):
            if (output := known.get(slots[index])) is not None:
                tokens = None if row < first else _tokens_of(batch, row)
                rows.append(ConstrainedRow(index, output, batch.starts[row] - output.num_prompt_tokens, tokens))
        if len(batch.slots) > first:
            sampled = set(batch.sampled)
            for row in range(first, len(batch.slots)):
                output = known.get(batch.slots[row])
                if output is not None and row not in sampled:
                    place = batch.starts[row] - output.num_prompt_tokens
                    rows.append(ConstrainedRow(-1, output, place, _tokens_of(batch, row)))
        return rows

    def ask(self, rows: list[ConstrainedRow], newest: Callable[[list[int]], list[int]]) -> None:
        """Ask for the masks of a step. `newest` returns what slots have sampled last, for which it may wait."""
        decodes = [row.output.slot for row in rows if row.tokens is None]
        drawn = dict(zip(decodes, newest(decodes), strict=True)) if decodes else {}
        self._asked, self._sent, self._number = {}, {}, (self._number + 1) % 2**31
        for row in rows:
            output = row.output
            if row.tokens is None:
                output.is_now(row.place, [drawn[output.slot]])
            elif row.place + len(row.tokens) > 0:
                output.is_now(max(0, row.place), row.tokens[max(0, -row.place) :])
            if row.sample >= 0:
                self._asked.setdefault(self.processes.index_of(output.grammar), []).append(row)
        for index, asked in self._asked.items():
            self._send(index, asked)

    def answer(self) -> Masks:
        """Wait for the masks that were asked for."""
        setup = self.processes.setup
        words = self._shared()[: setup.max_num_seqs * setup.num_words].view(setup.max_num_seqs, setup.num_words)
        masks = Masks({row.sample: row.output.slot for asked in self._asked.values() for row in asked}, words)
        for index, asked in self._asked.items():
            self._receive(index, asked, masks)
        self.num_rows += len(masks.slots)
        self.num_failures += len(masks.failed)
        for row in masks.failed:
            del masks.slots[row]
        return masks

    def _shared(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.frombuffer(self.processes.memory.bytes, dtype=torch.int32)
        return self._memory

    def _send(self, index: int, rows: Iterable[ConstrainedRow]) -> None:
        """Send what a process has to know and is asked; where it is gone, `_receive` finds that out."""
        process = self.processes.matching(index)
        self._sent[index] = process
        frame = array("i", [self._number])
        for row in rows:
            output = row.output
            if output.matching is not process:
                output.matching, output.num_told = process, 0
                frame.extend((Op.ADMIT, output.slot, *array("i", output.grammar.hash), 0))
            told = output.tokens[output.num_told :]
            frame.extend((Op.ROW, output.slot, output.num_told, len(told), *told))
            output.num_told = len(output.tokens)
        try:
            process.steps.settimeout(STEP_SECONDS)
            send_frame(process.steps, frame.tobytes())
        except OSError:
            process.kill()

    def _receive(self, index: int, rows: list[ConstrainedRow], masks: Masks) -> None:
        """Wait for a process's answer; ask again what is left of it where it fails."""
        attempts, rounds = 0, 0
        while rows:
            process = self._sent[index]
            try:
                answer = array("i", receive_frame(process.steps))
                while answer[0] != self._number:  # to a question that nobody has waited for
                    answer = array("i", receive_frame(process.steps))
            except (EOFError, OSError) as error:
                attempts += 1
                rows = self._after_failure(index, process, rows, masks, error, attempts)
            else:
                rows = self._take(process, answer, rows, masks)
                rounds += 1
                if rounds > 2 * _ATTEMPTS:
                    masks.failed += [row.sample for row in rows]
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
        attempts: int,
    ) -> list[ConstrainedRow]:
        """Return the rows to ask for again: not the one that a process was working on when it failed."""
        place = index - self.processes.num_matching  # from the end
        blamed = int(self._shared()[place])
        self._shared()[place] = -1
        log.error(
            "grammar process %d ends working on slot %d: %s", process.pid, blamed, str(error) or type(error).__name__
        )
        self.processes.lost(process)
        failed = [row for row in rows if row.output.slot == blamed or attempts == _ATTEMPTS]
        masks.failed += [row.sample for row in failed]
        return [row for row in rows if row not in failed]

    def _take(
        self, process: MatchingProcess, answer: "array[int]", rows: list[ConstrainedRow], masks: Masks
    ) -> list[ConstrainedRow]:
        """Take over an answer; returns the rows whose grammars were not known, and are now."""
        self.seconds += answer.pop() / 1e6
        place, again = 1, []
        for row in rows:
            status, count = answer[place], answer[place + 1]
            forced = answer[place + 2 : place + 2 + count].tolist()
            place += 2 + count
            if status == RowStatus.UNKNOWN:
                row.output.matching = None
                try:
                    process.compile(row.output.grammar)
                except GrammarInvalid:
                    masks.failed.append(row.sample)
                    continue
                except (EOFError, OSError):
                    process.kill()
                again.append(row)
            elif status != RowStatus.MASKED:
                masks.failed.append(row.sample)
            elif len(forced) > 1 and row.output.may_jump:
                masks.forced[row.sample] = forced[1:]
        return again


def _depends_on_samples(sampling: SamplingParams) -> bool:
    """Return True if more than a grammar says which tokens may follow, or if the device counts what it has sampled."""
    restricts = sampling.bad_words or sampling.allowed_token_ids is not None or sampling.min_tokens
    return sampling.penalised or bool(restricts)


def _tokens_of(batch: Batch, row: int) -> list[int]:
    """Return the tokens that a row behind the decodes computes."""
    begin = sum(batch.lengths[batch.num_decodes : row])
    return batch.token_ids[begin : begin + batch.lengths[row]]
