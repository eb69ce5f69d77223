"""Masks of a step's rows: from every process, in every order of steps, and after a process has failed."""

import os
import signal
import socket
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.structured_output.compiler import GrammarCompiler
from backend.structured_output.frames import receive_frame, send_frame
from backend.structured_output.masks import Masks, TokenMasks
from backend.structured_output.processes import GrammarProcesses, MatchingProcess
from tests.backend.structured_output.grammars import CONFIG, END, PERSON, regex, running_processes

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    with running_processes(num_seqs=4, num_processes=2) as running:
        compiler = GrammarCompiler(running)
        for grammar in (PERSON, regex("ab+", "b")):
            compiler.compile_now(grammar)
        yield running


class Rows:
    """Slots that generate what their masks allow: the first token of each mask."""

    def __init__(self, processes: GrammarProcesses, grammars: list[Grammar | None], **sampling: Any) -> None:
        self.masks = TokenMasks(processes)
        self.outputs: dict[int, list[int]] = {}
        self.step = 0
        self.admit(grammars, [[] for _ in grammars], **sampling)

    def admit(self, grammars: list[Grammar | None], outputs: list[list[int]], **sampling: Any) -> None:
        self.fresh = set(range(len(grammars)))
        for slot, (grammar, output) in enumerate(zip(grammars, outputs, strict=True)):
            self.outputs[slot] = list(output)
            params = SamplingParams(grammar=grammar, **sampling)
            self.masks.fill_slot(NewSequence(slot, params, 0, PROMPT + output, len(PROMPT)))

    def batch(self) -> Batch:
        """Returns a step of all slots: those that were just admitted prefill, all others decode."""
        batch = Batch(self.step)
        self.step += 1
        for slot in sorted(self.outputs, key=lambda slot: slot in self.fresh):
            known = PROMPT + self.outputs[slot]
            is_new = slot in self.fresh
            batch.num_decodes += not is_new
            batch.slots.append(slot)
            batch.starts.append(0 if is_new else len(known) - 1)
            batch.lengths.append(len(known) if is_new else 1)
            batch.token_ids += known if is_new else []
        batch.sampled = list(range(len(batch.slots)))
        self.fresh = set()
        return batch

    def ask(self, batch: Batch) -> Masks:
        self.send(batch)
        return self.masks.answer()

    def send(self, batch: Batch) -> None:
        """Asks for the masks of a step, once its decodes' tokens are known to have been sampled."""
        decodes = np.array(batch.slots[: batch.num_decodes], np.int64)
        self.masks.sampled(decodes, np.array([self.outputs[slot][-1] for slot in decodes], np.int64))
        rows = self.masks.rows_of(batch)
        assert rows is not None
        self.masks.ask(rows)

    def allowed(self, taken: Masks) -> dict[int, set[int]]:
        """Returns by slot which tokens a step's masks allow."""
        words = taken.words.numpy().view("uint32")
        return {
            slot: {token for token in range(CONFIG.vocab_size) if words[slot][token // 32] >> token % 32 & 1}
            for slot in taken.slots.values()
        }

    def run(self) -> Masks:
        batch = self.batch()
        taken = self.ask(batch)
        for slot, tokens in self.allowed(taken).items():
            self.outputs[slot].append(max(tokens))
        for slot in set(batch.slots) - set(taken.slots.values()):
            self.outputs[slot].append(0)
        return taken


def test_rows_of_several_owners_match_and_others_are_left_alone(processes: GrammarProcesses) -> None:
    rows = Rows(processes, [PERSON, None, regex("ab+", "b")])
    assert rows.run().slots == {0: 0, 2: 2}
    for _ in range(80):
        rows.run()
    assert rows.outputs[0][-1] == END
    assert rows.outputs[1] == [0] * 81
    assert rows.masks.num_failures == 0
    assert rows.masks.num_rows == 162


def test_processor_time_of_matching_is_counted_for_the_rows_owners(processes: GrammarProcesses) -> None:
    time = processes.mask_time
    for owner in ("", "b"):
        time.take_seconds(owner)
    rows = Rows(processes, [PERSON, None, regex("ab+", "b")])
    for _ in range(5):
        rows.run()
    first = time.take_seconds("b")
    rows.admit([PERSON, PERSON, PERSON], [[], [], []])
    rows.run()
    assert 0 < first < time.seconds
    assert time.take_seconds("b") == 0
    assert 0 < time.take_seconds("") < time.seconds
    assert time.take_seconds("") == 0


def test_forced_tokens_are_told_where_they_may_be_taken_at_once(processes: GrammarProcesses) -> None:
    rows = Rows(processes, [PERSON, regex("ab+", "b")])
    told = dict[int, list[int]]()
    for _ in range(40):
        place = len(rows.outputs[0])
        taken = rows.run()
        if 0 in taken.forced:
            told[place] = taken.forced[0]
    assert told
    for place, tokens in told.items():
        assert rows.outputs[0][place : place + len(tokens)] == tokens[: len(rows.outputs[0]) - place]
    for asked in ({"logprobs": 0}, {"bad_words": ((3, 4),)}, {"allowed_token_ids": (3,)}, {"min_tokens": 2}):
        shown = Rows(processes, [PERSON], **asked)
        assert not any(shown.run().forced for _ in range(15))


def test_a_chunk_of_known_tokens_and_a_step_that_comes_again_change_nothing(processes: GrammarProcesses) -> None:
    rows = Rows(processes, [PERSON])
    for _ in range(12):
        rows.run()
    output = rows.outputs[0]
    expected = rows.allowed(rows.ask(rows.batch()))
    assert rows.allowed(rows.ask(rows.batch())) == expected
    chunk = Batch(99, 0, [0], [len(PROMPT) + 4], [len(output) - 4], output[4:], [0])
    assert rows.allowed(rows.ask(chunk)) == expected
    cut = Batch(100, 0, [0], [len(PROMPT) + 2], [3], output[2:5], [])
    assert rows.ask(cut).slots == {}
    rest = Batch(101, 0, [0], [len(PROMPT) + 5], [len(output) - 5], output[5:], [0])
    assert rows.allowed(rows.ask(rest)) == expected
    rows.admit([PERSON], [output])  # as after a preemption
    assert rows.allowed(rows.ask(rows.batch())) == expected


def test_an_answer_that_nobody_waited_for_is_not_taken_for_another(processes: GrammarProcesses) -> None:
    undisturbed = Rows(processes, [PERSON])
    for _ in range(6):
        undisturbed.run()
    rows = Rows(processes, [PERSON])
    for _ in range(6):
        rows.run()
        rows.send(rows.batch())
    assert rows.outputs == undisturbed.outputs


@pytest.mark.parametrize("is_stopped", [False, True])
def test_matchers_are_made_again_where_a_process_has_ended_or_does_not_answer(
    processes: GrammarProcesses, is_stopped: bool
) -> None:
    undisturbed, rows = (Rows(processes, [PERSON, regex("ab+", "b"), PERSON]) for _ in range(2))
    for _ in range(6):
        undisturbed.run()
    for step in range(6):
        if step == 3:
            killed = processes.matching(processes.index_of(PERSON))
            os.kill(killed.pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
        rows.run()
    assert rows.outputs == undisturbed.outputs
    assert rows.masks.num_failures == 0


def test_a_row_that_a_process_ends_with_fails_and_its_neighbours_go_on(processes: GrammarProcesses) -> None:
    rows, index = Rows(processes, [PERSON, PERSON]), processes.index_of(PERSON)
    rows.run()
    ours, theirs = socket.socketpair()
    real = processes.matching(index)
    doomed = MatchingProcess(real.pid, [ours, real.links[1]], os.eventfd(0))
    processes._matching[index] = doomed
    rows.send(rows.batch())
    rows.masks._shared.working_on[index] = 1
    theirs.close()
    taken = rows.masks.answer()
    real.close()
    assert taken.failed == [1]
    assert taken.slots == {0: 0}
    assert rows.masks.num_failures == 1


def test_a_row_is_not_blamed_for_a_process_that_is_given_no_time(processes: GrammarProcesses) -> None:
    rows, index = Rows(processes, [PERSON, PERSON]), processes.index_of(PERSON)
    rows.run()
    os.kill(processes.matching(index).pid, signal.SIGSTOP)
    rows.send(rows.batch())
    rows.masks._shared.working_on[index] = 1
    assert rows.masks.answer().failed == []


def test_a_process_that_was_ended_meanwhile_rings_at_no_other_file() -> None:
    """A client's connection, for instance, that was accepted under the number of the doorbell."""
    process = MatchingProcess(0, [*socket.socketpair()], doorbell := os.eventfd(0))
    process.close()
    reads, writes = os.pipe()
    client = os.dup2(writes, doorbell)
    with suppress(ValueError):
        process.ring()
    os.close(client)
    os.close(writes)
    assert os.read(reads, 8) == b""
    os.close(reads)


def test_rows_fail_alone_where_no_process_can_be_had_for_them(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, matching = Rows(processes, [PERSON, regex("ab+", "b")]), processes.matching
    away = processes.index_of(PERSON)
    assert away != processes.index_of(regex("ab+", "b"))

    def none_there(index: int) -> MatchingProcess:
        if index == away:
            raise BlockingIOError("Resource temporarily unavailable")
        return matching(index)

    rows.run()
    with monkeypatch.context() as patched:
        patched.setattr(processes, "matching", none_there)
        taken = rows.ask(rows.batch())
        assert (taken.failed, list(taken.slots)) == ([0], [1])
    again = rows.ask(rows.batch())
    assert (again.failed, list(again.slots)) == ([], [0, 1])


def test_a_row_without_a_token_fails(processes: GrammarProcesses) -> None:
    rows = Rows(processes, [PERSON])
    rows.run()
    rows.outputs[0][-1] = 17
    assert rows.ask(rows.batch()).failed == [0]


def test_frames_of_any_size_cross_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        payload = array("i", range(2000)).tobytes()
        send_frame(ours, payload)
        send_frame(ours, b"")
        assert receive_frame(theirs) == payload
        assert receive_frame(theirs) == b""
        ours.close()
        with pytest.raises(EOFError):
            receive_frame(theirs)
