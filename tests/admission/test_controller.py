import pytest

from admission.controller import Controller
from admission.core import CoreConfig, MemoryGate, Overload, make_core
from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockNames
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from tests.admission.clocked_core import ClockedCore
from tests.admission.staged_core import StagedCore
from tests.backend.sequences import make_sequence

CONFIG = CoreConfig(memory=MemoryGate.OPTIMISTIC)


def crowded(count: int, max_preemptions: int) -> tuple[ClockedCore, list[Sequence]]:
    """More than there is memory for, once they have grown."""
    engine = EngineConfig(12, 48, 4, 4, 16, prefill_chunk=8, max_preemptions=max_preemptions)
    machine = ClockedCore(make_core(CONFIG, engine), lambda step: 0.01)
    sequences = [make_sequence(f"s{n}", "t", 8, 38, first_token_target=60.0) for n in range(count)]  # each is promised
    for sequence in sequences:
        machine.add(sequence)
        machine.now += 0.001
    return machine, sequences


def test_a_preempted_sequence_counts_as_waiting_even_where_no_step_was_planned() -> None:
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


def test_nothing_is_kept_of_a_sequence_that_loses_its_memory_for_good() -> None:
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
        return [stage.core.ledger.promises[one].first_token for one in arrived], stage.core.backlog.total.tokens

    (first, *_, last), waiting = told(prompt_group="s0")
    (alone, *_, eighth), apart = told()
    assert (waiting, apart) == (107, 800)
    assert first == alone and first and last and eighth and last < 1.5 * first < 0.5 * eighth


def test_a_newcomer_pays_its_prompt_ahead_and_nothing_of_an_answer_that_may_never_come() -> None:
    core = make_core(CONFIG, EngineConfig(8192, 131_072, max_num_seqs=4, prefix_cache=False))
    core.arrive(make_sequence("first", "a", 100, 100_000), 0.0)
    core.schedule(0.0)
    prompt = [promise.prepaid for promise in core.ledger.promises.values()]
    charged = core.share.account("a").charged
    assert charged > 0 and sum(prompt) < 0.1 * charged, "its first step has used what it paid"
    assert core.credit("a") == pytest.approx(-charged, rel=0.1)


def test_a_sequence_that_follows_a_leader_prepays_no_prompt() -> None:
    stage = StagedCore(CoreConfig(calibration=False), num_blocks=4000, max_model_len=256, max_num_seqs=32)
    group = [stage.arrive(f"s{n}", [7] * 200, 4, prompt_group="s0") for n in range(24)]
    stage.plan()
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in group)
    stage.arrive("more", [8] * 200, 40)
    while any(sequence.status is not SequenceStatus.FINISHED for sequence in group):
        stage.plan()
        stage.complete()
    assert stage.core.credit("a") <= 1e-12, "nothing of what 23 prompts would have cost"
    stage.run()


def test_waiting_sequences_are_looked_up_a_few_times_a_step_for_any_number_of_followers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = StagedCore(CoreConfig(calibration=False), num_blocks=4000, max_model_len=256, max_num_seqs=32)
    group = [stage.arrive(f"s{n}", [7] * 200, 4, prompt_group="s0") for n in range(32)]
    stage.plan()
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in group)
    head = stage.arrive("more", [7] * 160, 4)
    tables, looked_up = stage.scheduler.kv_manager.blocks, list[Sequence]()
    find = tables.find

    def counted(sequence: Sequence, step: int, *, from_host: bool = True) -> PrefixHit:
        looked_up.append(sequence)
        return find(sequence, step, from_host=from_host)

    monkeypatch.setattr(tables, "find", counted)
    for _ in range(4):
        stage.complete()
        looked_up.clear()
        stage.plan()
        assert looked_up.count(head) <= 4
    stage.run()


def test_a_refused_request_leaves_the_prefix_cache_unchanged() -> None:
    stage = StagedCore(CoreConfig(calibration=False), num_blocks=200, max_model_len=64)
    stage.arrive("before", [7] * 40, 2)
    stage.run()
    stage.arrive("other", 8, 40, tenant="b")
    stage.plan()
    names = stage.arrive("again", [7] * 40, 2).block_names
    cached = [stage.scheduler.kv_manager.cache.named(name) for name in names]
    stage.run()
    chains = [one.chain for one in cached if one is not None]
    assert len(chains) == 10
    stage.arrive("other again", 8, 40, tenant="b")
    stage.plan()
    for number in range(20):
        stage.refused(f"a{number}", [7] * 40, first_token_by=stage.now + 1e-9)
    assert [one.chain for one in cached if one is not None] == chains
    stage.run()


def test_a_deadline_that_passes_while_nothing_is_planned_is_found() -> None:
    stage = StagedCore(CoreConfig(calibration=False))
    held = stage.arrive("held", 8, 20, may_have=4, done_by=stage.now + 50.0)
    while stage.launched or stage.core.schedule(stage.now) is not None:
        if not stage.launched:
            stage.launch(stage.scheduler.in_flight[-1])
        stage.complete()
    assert held.status is SequenceStatus.RUNNING
    assert held.request.done_by is not None
    while (wakes_at := stage.core.wakes_at) is not None:
        assert stage.now < wakes_at < held.request.done_by + 0.01
        stage.now = wakes_at
        stage.plan()
    assert held.finish_reason is FinishReason.EXPIRED
    assert stage.now > held.request.done_by


def test_a_tenant_takes_a_slot_once_its_hold_is_lifted_though_a_search_was_in_vain_before() -> None:
    engine = EngineConfig(400, 256, max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=64)
    machine = ClockedCore(make_core(CoreConfig(overload=Overload.UNBOUNDED), engine), lambda step: 0.01)
    for n in range(4):
        machine.add(make_sequence(f"full{n}", "full", 8, 200))
    machine.steps(40)
    machine.add(make_sequence("pressing", "full", 8, 200, first_token_by=machine.now - 1))
    held = make_sequence("held", "held", 8, 200)
    held.limit_to(0)
    machine.add(held)
    machine.step()
    assert machine.scheduler.held_tenants == {"held": WaitReason.TOKENS}
    next_one = machine.add(make_sequence("next", "held", 8, 200))
    machine.step()
    machine.finish(held)
    machine.steps(5)
    assert next_one.status is SequenceStatus.RUNNING


def test_a_prompt_that_waits_for_a_block_of_another_prompt_prepays_all_of_its_own() -> None:
    engine = EngineConfig(400, 2048, max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk=32)
    machine = ClockedCore(make_core(CoreConfig(overload=Overload.UNBOUNDED), engine), lambda step: 0.01)
    beginning = [1] * 32
    sequences = [make_sequence(f"s{n}", "t", [*beginning, *[n + 2] * 1000], 8) for n in range(2)]
    names = BlockNames(b"key", engine.block_size)
    for sequence in sequences:
        sequence.cache_root = names.root("t")
        names.name(sequence, sequence.num_prompt_tokens // engine.block_size)
        machine.add(sequence)
    machine.core.schedule(machine.now)
    first, second = (machine.core.ledger.promises[sequence] for sequence in sequences)
    assert all(sequence.slot >= 0 for sequence in sequences)
    assert second.prepaid >= first.prepaid > 0
