import pytest

from admission.controller import Controller
from admission.core import SCALES, CoreConfig, MemoryGate, Unit, make_core
from backend.config import EngineConfig
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from tests.admission.clocked_core import ClockedCore
from tests.admission.staged_core import StagedCore
from tests.backend.sequences import make_sequence

CONFIG = CoreConfig(unit=Unit.TOKENS, memory=MemoryGate.OPTIMISTIC, **SCALES[Unit.TOKENS]._asdict())


def crowded(count: int, max_preemptions: int) -> tuple[ClockedCore, list[Sequence]]:
    """More than there is memory for, once they have grown."""
    engine = EngineConfig(12, 48, 4, 4, 16, prefill_chunk=8, max_preemptions=max_preemptions)
    machine = ClockedCore(make_core(CONFIG, engine), lambda step: 0.01)
    sequences = [make_sequence(f"s{n}", "t", 8, 38, first_token_target=60.0) for n in range(count)]  # each is promised
    for sequence in sequences:
        machine.add(sequence)
        machine.now += 0.001
    return machine, sequences


def test_whoever_is_preempted_counts_as_waiting_even_where_no_step_was_planned() -> None:
    machine, sequences = crowded(2, max_preemptions=8)
    in_vain = 0
    while machine.scheduler.has_work:
        machine.plan()
        in_vain += 0 if machine.scheduler.is_full else len(machine.scheduler.preempted)
        for sequence in sequences:
            waits = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert (sequence in machine.core.backlog) == waits
        machine.complete()
    assert in_vain


def test_nothing_is_kept_of_whoever_loses_its_memory_for_good() -> None:
    machine, sequences = crowded(4, max_preemptions=0)
    ended = []
    while machine.scheduler.has_work:
        ended += machine.step()
    assert ended and {*ended} == {s for s in sequences if s.finish_reason is FinishReason.PREEMPTED}
    assert not machine.core.control.calibration._open and machine.core.backlog.total.count == 0


def test_when_those_given_up_are_taken_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for takes in (True, False):
        if not takes:
            monkeypatch.setattr(Controller, "take_ended", lambda self: [])
        machine, _ = crowded(6, max_preemptions=0)
        batches, credits_ = [], []
        while machine.scheduler.has_work:
            machine.plan()
            batches += [step.batch for step in machine.launched]
            credits_.append(machine.core.credit("t"))
            if machine.launched:
                machine.complete()
        runs.append((batches, credits_))
    assert runs[0] == runs[1]


def test_of_answers_to_one_prompt_the_first_alone_waits_with_its_prefill() -> None:
    def told(**fields: str) -> tuple[list[float | None], int]:
        stage = StagedCore(CoreConfig(), num_blocks=400, max_model_len=256, max_num_seqs=16)
        arrived = [
            stage.arrive(f"s{n}", [7] * 99 + [n * (not fields)], 4, first_token_target=9.0, **fields) for n in range(8)
        ]
        return [sequence.first_token_estimate for sequence in arrived], stage.core.backlog.total.tokens

    (first, *_, last), waiting = told(prompt_group="s0")
    (alone, *_, eighth), apart = told()
    assert (waiting, apart) == (107, 800)
    assert first == alone and first and last and eighth and last < 1.5 * first < 0.5 * eighth


def test_a_newcomer_pays_ahead_for_what_answers_have_shown_and_not_for_what_it_declares() -> None:
    """Alone it would be granted all of it, and have it back as credit against those who come later."""
    core = make_core(CONFIG, EngineConfig(8192, 131_072, max_num_seqs=4, prefix_cache=False))
    core.arrive(make_sequence("first", "a", 100, 100_000), 0.0)
    before = core.credit("a")
    core.schedule(0.0)
    assert core.credit("a") == before - 102
    core.lengths.observe("a", 100_000, 30)
    core.arrive(make_sequence("second", "a", 100, 100_000), 1.0)
    before = core.credit("a")
    core.schedule(1.0)
    assert core.credit("a") >= before - 100 - 2.0 * 30
