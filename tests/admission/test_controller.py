"""Those that a plan preempts or gives up, whether or not it comes to a step."""

from admission.controller import Controller
from admission.core import SCALES, CoreConfig, MemoryGate, Unit, make_core
from backend.config import EngineConfig
from backend.scheduler.batch import StepOutput
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from tests.admission.sequences import make_sequence

CONFIG = CoreConfig(unit=Unit.TOKENS, memory=MemoryGate.OPTIMISTIC, **SCALES[Unit.TOKENS]._asdict())


def engine(max_preemptions: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        prefill_chunk=8,
        max_model_len=48,
        max_preemptions=max_preemptions,
    )


def crowd(core: Controller, count: int) -> list[Sequence]:
    """More than there is memory for, once they have grown."""
    sequences = [make_sequence(f"s{n}", "t", 8, 38) for n in range(count)]
    for n, sequence in enumerate(sequences):
        sequence.first_token_target = 60.0  # so that it is promised something
        core.arrive(sequence, n / 1000)
    return sequences


def complete(core: Controller, now: float) -> None:
    batch = core.scheduler.in_flight[0].batch
    core.update_from_output(StepOutput(batch.step, [5] * len(batch.sampled), 0.01), now)


def test_whoever_is_preempted_counts_as_waiting_even_where_no_step_was_planned() -> None:
    core = make_core(CONFIG, engine(max_preemptions=8))
    sequences, now, in_vain = crowd(core, 2), 1.0, 0
    while core.scheduler.has_work:
        while not core.scheduler.is_full:
            if core.schedule(now) is None:
                in_vain += len(core.scheduler.preempted)
                break
        for sequence in sequences:
            waits = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert (sequence in core.backlog) == waits
        complete(core, now := now + 0.01)
    assert in_vain


def test_nothing_is_kept_of_whoever_loses_its_memory_for_good() -> None:
    core = make_core(CONFIG, engine(max_preemptions=0))
    sequences, now = crowd(core, 4), 1.0
    ended = []
    while core.scheduler.has_work:
        while core.schedule(now) is not None:
            pass
        ended += core.take_ended()
        if core.scheduler.in_flight:
            complete(core, now := now + 0.01)
    assert ended and {*ended} == {s for s in sequences if s.finish_reason is FinishReason.PREEMPTED}
    assert not core.control.calibration._open and core.backlog.total.count == 0


def test_when_those_given_up_are_taken_changes_no_decision() -> None:
    runs = []
    for takes in (True, False):
        core = make_core(CONFIG, engine(max_preemptions=0))
        crowd(core, 6)
        now, batches, credits_ = 1.0, [], []
        while core.scheduler.has_work:
            while (batch := core.schedule(now)) is not None:
                batches.append(batch)
            if takes:
                core.take_ended()
            credits_.append(core.credit("t"))
            if core.scheduler.in_flight:
                complete(core, now := now + 0.01)
        runs.append((batches, credits_))
    assert runs[0] == runs[1]
