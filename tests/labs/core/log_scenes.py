"""Each function here records a short event log of one thing, and returns its lines.

A sequence to which something happens has an id that says what, and is asserted to be in that state.
`scripts/record_logs.py` calls each function once for each version of the log.
"""

from admission.core import CoreConfig, MemoryGate, Overload
from admission.outcome import AdmissionRefused, DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.request import JudgedPrompt, JudgedRequest
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from backend.calibration_steps import calibration_series
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import SPARE_CLASS, FinishReason, Sequence, SequenceStatus
from tests.admission.staged_core import StagedCore

GREEDY = CoreConfig(
    memory=MemoryGate.OPTIMISTIC
)  # a prompt that fits now joins, and preemption helps when it no longer does


def refusals() -> list[str]:
    """Newcomers meet each kind of refusal, by each bound and each deadline that may be its reason."""
    stage = StagedCore(CoreConfig(max_waiting=10, tenant_max_waiting=3), max_num_seqs=2)
    bounds = (QueueBounds(), QueueBounds(), QueueBounds(count=2))
    stage.core.set_policy(SchedulingPolicy({"a": 2.0}, (0.0, 2.0, 4.0), bounds, {"limited": 1}), stage.now)
    for name in ("runs", "runs-too"):
        stage.arrive(name, prompt=12, output=40)
    stage.step()
    soon = stage.now + 1e-3
    assert isinstance(stage.refused("refused-first-token", tenant="b", first_token_by=soon), DeadlineInfeasible)
    assert isinstance(stage.refused("refused-last-token", tenant="b", done_by=soon), DeadlineInfeasible)
    for n in range(3):
        stage.arrive(f"waits-full-{n}", tenant="full")
    assert isinstance(stage.refused("refused-tenant-bound", tenant="full"), TenantQueueFull)
    stage.arrive("waits-limited", tenant="limited")
    assert isinstance(stage.refused("refused-tenant-limit", tenant="limited"), TenantQueueFull)
    for n in range(2):
        stage.arrive(f"waits-low-{n}", tenant="low", priority_class=2)
    full = stage.refused("refused-class-bound", tenant="low", priority_class=2)
    assert isinstance(full, QueueFull) and full.of_class
    stage.step()
    for n in range(4):
        stage.arrive(f"waits-{n}", tenant=f"t{n}")
    full = stage.refused("refused-shared-bound", tenant="t0")
    assert isinstance(full, QueueFull) and not full.of_class
    return stage.run()


def spare() -> list[str]:
    """The spare class runs beside a decode, not beside a prompt, and gives back slots and blocks to others."""
    stage = StagedCore(CoreConfig(spare_share=0.5), max_num_seqs=3)
    for name in ("spare-runs", "spare-runs-too", "spare-waits"):
        stage.arrive(name, prompt=12, output=30, priority_class=SPARE_CLASS)
    for _ in range(4):
        stage.step()
    decodes = stage.arrive("decodes", prompt=4, output=30)
    for _ in range(4):
        stage.step()
    assert decodes.output, "it was not held up"
    others = [stage.arrive(f"takes-a-slot-{n}", prompt=8, output=20) for n in range(2)]
    for _ in range(6):
        stage.step()
    assert all(one.status is SequenceStatus.RUNNING for one in others)
    assert stage.core.scheduler.counters.yields > 0
    return stage.run()


UNITS: dict[str, dict[str, int]] = {  # requests of which most meet a bound of this unit first
    "count": {},
    "tokens": {"prompt": 40},
    "bytes": {"body_bytes": 400},
    "seconds": {"output": 50},
}


def shared_bounds() -> list[str]:
    """One tenant fills the shared queue and then that of a class, in each unit that has a bound."""
    bounds = {"max_waiting": 5, "max_waiting_tokens": 130, "max_waiting_bytes": 1300, "max_waiting_seconds": 0.042}
    stage = StagedCore(CoreConfig(**bounds), max_num_seqs=1)
    stage.arrive("runs", output=40)
    stage.step()
    for unit, fields in UNITS.items():
        full = _fill(stage, f"shared-{unit}", **fields)
        assert isinstance(full, QueueFull) and full.excess.unit == unit and not full.of_class
    stage.core.set_policy(SchedulingPolicy(offsets=(0.0,), bounds=(QueueBounds(4, 80, 800, 0.03),)), stage.now)
    for unit, fields in UNITS.items():
        full = _fill(stage, f"class-{unit}", **fields)
        assert isinstance(full, QueueFull) and full.excess.unit == unit and full.of_class
    return stage.run()


def tenant_bounds() -> list[str]:
    """One tenant fills what it may have waiting itself, in each unit that has a bound."""
    bounds = {"tenant_max_waiting": 5, "tenant_max_waiting_tokens": 100, "tenant_max_waiting_bytes": 1000}
    stage = StagedCore(CoreConfig(**bounds, tenant_max_waiting_seconds=0.03), max_num_seqs=1)
    stage.arrive("runs", output=40)
    stage.step()
    for unit, fields in UNITS.items():
        full = _fill(stage, f"tenant-{unit}", **fields)
        assert isinstance(full, TenantQueueFull) and full.excess.unit == unit
    return stage.run()


def _fill(stage: StagedCore, name: str, **fields: int) -> AdmissionRefused:
    """Let newcomers come until one is refused, and the queued ones leave; returns the refusal."""
    waiting: list[Sequence] = []
    while True:
        try:
            waiting.append(stage.arrive(f"waits-{name}-{len(waiting)}", **fields))
        except AdmissionRefused as refusal:
            for sequence in waiting:
                stage.finish(sequence)
            return refusal


def preemptions() -> list[str]:
    """Sequences are preempted for the memory of a running one, for a higher class, and out of a deadlock."""
    stage = StagedCore(GREEDY, num_blocks=16, steps_in_flight=1)
    stays = stage.arrive("stays", 24, 24)
    stage.step()
    yields = stage.arrive("preempted-for-memory", 24, 24)
    stage.run()
    assert yields.num_preemptions and not stays.num_preemptions

    low = [stage.arrive(f"preempted-for-slot-{n}", 4, 8, priority_class=2) for n in range(4)]
    stage.step()
    stage.arrive("urgent", 4, 8, tenant="b")
    stage.step()
    assert sum(sequence.num_preemptions for sequence in low) == 1 and stage.scheduler.wait_reason is WaitReason.SLOTS
    stage.run()

    large = stage.arrive("preempted-for-class", 40, 16, priority_class=2)
    stage.step(), stage.step(), stage.step()
    stage.arrive("urgent-too", 40, 16, tenant="b")
    stage.step()
    assert large.num_preemptions == 1 and stage.scheduler.wait_reason is WaitReason.MEMORY
    stage.run()

    equals = [stage.arrive(f"preempted-in-deadlock-{n}", 24, 24) for n in range(2)]  # neither ranks below the other
    stage.run()
    assert sum(sequence.num_preemptions for sequence in equals) == 1
    return stage.lines


def past_bound() -> list[str]:
    """MemoryGate is so short that a sequence which was preempted as often as it may be is given up."""
    stage = StagedCore(GREEDY, num_blocks=16, steps_in_flight=1, max_preemptions=1)
    for n in range(4):
        stage.arrive(f"given-up-past-bound-{n}", 14, 48)
    given_up = []
    while stage.scheduler.has_work:
        given_up += stage.step()
    assert {sequence.finish_reason for sequence in given_up} == {FinishReason.PREEMPTED}
    return stage.lines


def leases() -> list[str]:
    """A tenant's KV memory is bounded, cut below what it holds, and free again; others are served meanwhile."""
    stage = StagedCore(CoreConfig())
    stage.allow("a", 30)
    old = stage.arrive("oldest", 16, 30)
    stage.arrive("other", 8, 40, tenant="b")
    stage.step()
    young = stage.arrive("gives-way", 12, 24)
    stage.step()
    stage.allow("a", 6)
    assert len(old.block_table.blocks) + len(young.block_table.blocks) > 6
    while not young.num_yields:
        stage.step()
    stage.arrive("passed-over", 30, 8)
    stage.step()
    assert stage.scheduler.held_tenants["a"] is WaitReason.ALLOWANCE
    stage.finish(stage.arrive("cancelled-passed-over", 30, 8))
    stage.step()
    stage.allow("a", 14)
    stage.step()
    stage.allow("a", None)
    stage.allow("b", 2)
    stage.arrive("other-larger", 20, 8, tenant="b")
    stage.step()
    stage.allow("b", None)
    return stage.run()


def leases_of_many() -> list[str]:
    """Several tenants meet their bounds in one step, in which the youngest of each gives way."""
    stage = StagedCore(CoreConfig(), max_num_seqs=10, num_blocks=100, max_num_batched_tokens=80)
    tenants = ("acme", "beta", "corp", "dyne", "echo")
    for name in ("oldest", "gives-way"):
        for tenant in tenants:
            stage.arrive(f"{name}-{tenant}", 8, 30, tenant=tenant)
        stage.step()
    for tenant in tenants:
        stage.allow(tenant, 4)
    while not stage.scheduler.counters.yields:
        stage.step()
    assert stage.scheduler.counters.yields == len(tenants)
    stage.step(), stage.step()
    for tenant in tenants:
        stage.allow(tenant, None)
    return stage.run()


def extensions() -> list[str]:
    """Answers pause where their tenants' token limits have no more for them, go on, or are left there."""
    stage = StagedCore(CoreConfig())
    pauses = stage.arrive("paused", 8, 24, may_have=4)
    waits = stage.arrive("held", 8, 24, tenant="b", may_have=0)
    stage.arrive("behind", 8, 4, tenant="b")
    while len(pauses.output) < 4:
        stage.step()
    stage.step()
    assert pauses.num_tokens == pauses.token_limit and stage.scheduler.held_tenants == {"b": WaitReason.TOKENS}
    stage.extend(waits, 10)
    stage.step()
    assert waits.status is SequenceStatus.RUNNING
    for _ in range(12):
        stage.step()
    stage.extend(pauses, 6)
    stage.step()
    stage.extend(pauses, 100)
    stage.extend(waits, 100)
    stage.run()
    assert len(pauses.output) == len(waits.output) == 24
    stage.extend(waits, 1)  # too late: it has ended
    paused = [stage.arrive(f"paused-and-left-{n}", 8, 24, may_have=1) for n in range(2)]
    stage.run()
    stage.finish(paused[0])
    stage.finish(paused[1], FinishReason.STOP)
    return stage.run()


def paused_in_the_way() -> list[str]:
    """A paused sequence is preempted when a lower-ranked one can only go on with its memory."""
    stage = StagedCore(GREEDY, num_blocks=16)
    paused = stage.arrive("gives-way-paused", 28, 24, may_have=1)
    stage.step()
    stage.arrive("needs-memory", 24, 30, tenant="b", priority_class=1)
    stage.run()
    assert paused.num_yields == 1 and not paused.num_preemptions
    stage.extend(paused, 24)
    return stage.run()


def losses() -> list[str]:
    """The device has no memory for a step with another behind it, for one alone, and for several in a row."""
    stage = StagedCore(CoreConfig(), max_num_batched_tokens=16, prefill_chunk=8)
    for n in range(4):
        stage.arrive(f"s{n}", 20, 10, tenant=f"t{n % 2}", priority_class=n % 3)
    stage.plan()
    assert len(stage.launched) == 2
    stage.lose()
    for _ in range(12):
        stage.step()
    stage.plan()
    stage.complete()
    assert len(stage.launched) == 1
    stage.lose()
    for _ in range(3):
        stage.plan()
        stage.lose()
    assert stage.scheduler.counters.rollback_preemptions
    return stage.run()


def answers() -> list[str]:
    """Several answers to a prompt start from one prefill, also once that was lost, and when who led has left. One that
    is paused is cancelled, and its blocks are named.
    """
    stage = StagedCore(GREEDY)
    forked = [stage.arrive(f"forked-{n}", [7] * 18, 12, prompt_group="forked-0") for n in range(3)]
    stage.plan()
    assert len(stage.launched) == 2 and len(stage.launched[1].forks) == 2
    stage.lose()
    stage.run()
    assert [(len(one.output), one.num_cached_tokens) for one in forked] == [(12, 0), (12, 18), (12, 18)]
    left, *others = [stage.arrive(f"led-{n}", [8] * 30, 4, prompt_group="led-0") for n in range(3)]
    stage.step()
    stage.finish(left)
    stage.run()
    assert others[1].num_cached_tokens == 30
    paused = stage.arrive("paused-and-named", [9] * 7, 24, may_have=6)
    stage.run()
    stage.finish(paused)
    return stage.run()


def cancels() -> list[str]:
    """Clients leave in each state that a sequence may be in; answers end by their texts, a token, or a failure."""
    stage = StagedCore(GREEDY, num_blocks=16)
    running = [stage.arrive(f"cancelled-decoding-{n}", 4, 30) for n in range(2)]
    prefilling = stage.arrive("cancelled-in-prefill", 40, 8)
    stage.plan()
    waiting = [stage.arrive(f"cancelled-waiting-{n}", 40, 8, tenant="b") for n in range(2)]
    stage.complete()
    assert prefilling.status is SequenceStatus.RUNNING and prefilling.num_computed_tokens < prefilling.num_prompt_tokens
    stage.finish(prefilling)
    assert stage.scheduler.kv_manager.is_in_flight(prefilling), "steps in scheduled still name it"
    stage.step()
    for sequence in (waiting[0], waiting[0], running[0]):
        stage.finish(sequence)
    stage.step()
    preempted = _preempted(stage, "cancelled-preempted", SequenceStatus.PREEMPTED)
    stage.finish(preempted)
    back = _preempted(stage, "cancelled-waiting-again", SequenceStatus.WAITING)
    stage.finish(back)
    for name, reason in (
        ("stopped-by-text", FinishReason.STOP),
        ("failed", FinishReason.FAILED),
        ("allowed-nothing", FinishReason.GRAMMAR),
    ):
        sequence = stage.arrive(name, 4, 20)
        stage.step(), stage.step(), stage.step()
        assert sequence.output and sequence.status is SequenceStatus.RUNNING
        stage.finish(sequence, reason)
    token = stage.arrive("stopped-by-token", 4, 20)
    stage.step(), stage.step()
    while token.status is not SequenceStatus.FINISHED:
        stage.step("stopped-by-token")
    stage.run()
    stage.finish(token)  # its client leaves when it has everything
    return stage.lines


def failures() -> list[str]:
    """The model computes no numbers for a prompt, between two tokens, in two rows at once, and after the end."""
    stage = StagedCore(CoreConfig())
    stage.failing |= {"failed-prompt", "failed-late", "failed-together-0", "failed-together-1"}
    beside = stage.arrive("beside", 8, 24)
    stage.arrive("failed-prompt", 12, 8, tenant="b")
    stage.step(), stage.step()
    together = [stage.arrive(f"failed-together-{n}", 6, 8, tenant="b") for n in range(2)]
    stage.step(), stage.step(), stage.step()
    assert [sequence.finish_reason for sequence in together] == [FinishReason.FAILED] * 2
    between = stage.arrive("failed-between-tokens", 8, 24)
    while len(between.output) < 3:
        stage.step()
    stage.failing.add("failed-between-tokens")
    late = stage.arrive("failed-late", 6, 8, tenant="b")
    stage.plan()
    stage.finish(late)
    stage.run()
    assert (between.finish_reason, beside.finish_reason) == (FinishReason.FAILED, FinishReason.LENGTH)
    return stage.lines


def jumps() -> list[str]:
    """Grammars force tokens after the first one, beside others, up to a limit, and in a step that is lost later."""
    stage = StagedCore(CoreConfig())
    stage.forced |= {"forced": 3, "forced-to-the-end": 40, "forced-within-a-limit": 5}
    beside = stage.arrive("beside", 8, 24)
    forced = stage.arrive("forced", 8, 24)
    complete = stage.arrive("forced-to-the-end", 8, 20, tenant="b")
    limited = stage.arrive("forced-within-a-limit", 8, 20, tenant="b", may_have=4)
    while complete.status is not SequenceStatus.FINISHED or not limited.output or not forced.output:
        stage.step()
    assert (complete.finish_reason, len(limited.output)) == (FinishReason.LENGTH, 4)
    for seconds in (0.25, 0.5, 0.001, 0.125, 2.0):  # for compiling what forces them
        stage.core.charge_side_work("b", seconds, stage.now)
    stage.plan()
    stage.lose()
    stage.extend(limited, 16)
    stage.step()
    assert len(forced.output) > len(beside.output)
    stage.run()
    assert stage.scheduler.counters.jump_forward_tokens > 30
    assert {one.finish_reason for one in (beside, limited)} == {FinishReason.LENGTH}
    return stage.lines


def drafts() -> list[str]:
    """Tokens are drafted behind answers that repeat, some in vain: beside others, up to a limit, in a lost step,
    in memory that others need, and for a client that leaves.
    """
    stage = StagedCore(GREEDY, num_blocks=20, speculate="lookup")
    stage.accepts = lambda drafted: stage.random.randint(0, drafted)
    drafted = stage.arrive("drafted", 8, 50)
    stage.arrive("beside", 8, 24, tenant="b")
    limited = stage.arrive("drafted-within-a-limit", 8, 20, tenant="b", may_have=6)
    while len(limited.output) < 6:
        stage.step()
    while not stage.scheduler.in_flight or not stage.scheduler.in_flight[-1].batch.drafts:
        stage.step()
        stage.plan()
    stage.lose()
    stage.extend(limited, 14)
    leaves = stage.arrive("leaves-with-a-draft", 8, 50)
    while not any(step.drafts.get(leaves) for step in stage.scheduler.in_flight):
        stage.step()
        stage.plan()
    stage.finish(leaves)
    others = [stage.arrive(f"takes-memory-{n}", 24, 24, tenant="b") for n in range(3)]
    stage.run()
    assert sum(one.num_preemptions for one in (drafted, *others)) > 0
    assert stage.scheduler.drafting is not None
    counts = stage.scheduler.drafting.counts
    assert counts["a"][1] > 0 and 10 < counts["b"][1] < counts["b"][0]
    assert stage.scheduler.counters.jump_forward_tokens == 0
    return stage.lines


def _preempted(stage: StagedCore, name: str, status: SequenceStatus) -> Sequence:
    """Have a sequence of a lower class give way; returns it once it is in this state."""
    sequence = stage.arrive(name, 40, 16, priority_class=2)
    while not sequence.output:
        stage.step()
    stage.arrive(f"urgent-for-{name}", 40, 8, tenant="c")
    while sequence.status is not status:
        stage.plan()
        if sequence.status is not status:
            stage.complete()
    return sequence


def give_ups() -> list[str]:
    """Deadlines pass in the queue, in prefill and between two tokens."""
    stage = StagedCore(CoreConfig(), max_num_seqs=2)
    waits = [stage.arrive(f"runs-{n}", 8, 40) for n in range(2)]
    stage.step()
    soon = stage.now + 0.2
    for name in ("expired-waiting", "expired-waiting-too"):
        stage.arrive(name, 8, 2, tenant="b", first_token_by=soon)
    stage.now += 0.5
    given_up = stage.step()
    assert [sequence.id for sequence in given_up] == ["expired-waiting", "expired-waiting-too"]
    stage.run()
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in waits)
    for name, output in (("expired-between-tokens", 40), ("expired-in-prefill", 2)):
        sequence = stage.arrive(name, 48 if output == 2 else 8, output, done_by=stage.now + 0.4)
        stage.step()
        assert sequence.status is SequenceStatus.RUNNING and bool(sequence.output) == (output == 40)
        stage.now += 0.5
        assert stage.plan() == [sequence]
        stage.run()
    return stage.run()


def controlled_delay() -> list[str]:
    """Requests that have waited too long in a queue that does not run empty are given up."""
    stage = StagedCore(CoreConfig(order="adaptive_lifo", overload=Overload.CONTROLLED_DELAY), max_num_seqs=1)
    stage.arrive("runs", 4, 8)
    stage.step()
    for n in range(4):
        stage.arrive(f"expired-standing-{n}", 4, 4)
        stage.now += 0.7
        stage.step()
    return stage.run()


def requests() -> list[str]:
    """A gateway tells what it is, and what its limits said of each request."""
    stage = StagedCore(CoreConfig())
    stage.log.serves("embedded", 4096, 1.75e9, stage.now)
    two = (JudgedPrompt(6, 9, True), JudgedPrompt(6, 9, True, is_repeated=True))
    open_end = (JudgedPrompt(5, 59, False),)
    stage.core.requested(JudgedRequest("cmpl-1", "a", "key-1", "flex", 180, 1.5, 20.0, 0.1, two), stage.now)
    for n, prompt in enumerate(two):
        stage.arrive(f"cmpl-1-{n}", prompt.prompt_tokens, prompt.most, priority_class=2, body_bytes=90)
    stage.step()
    stage.core.requested(JudgedRequest("cmpl-2", "a", None, None, 80, None, None, None, open_end), stage.now)
    stage.arrive("cmpl-2-0", 5, 59, may_have=8)
    stage.core.requested(
        JudgedRequest("cmpl-3", "b", "key-2", None, 80, None, 2.5, None, open_end, "tokens/min"), stage.now
    )
    stage.core.requested(JudgedRequest.unread("req-4", "b", "key-2", "tokens/min"), stage.now)
    stage.core.requested(
        JudgedRequest("cmpl-5", "b", "key-2", None, 80, None, None, None, open_end, "StoreUnavailable"), stage.now
    )
    return stage.run()


def calibration() -> list[str]:
    """Steps are run for what they take before the first request and between two; one of them is lost."""
    stage = StagedCore(CoreConfig())
    steps = [step for series in calibration_series(stage.engine) for step in series]
    stage.core.calibrated([(step, stage.took(step)) for step in steps], stage.now)
    for n in range(6):
        stage.arrive(f"runs-{n}")
        stage.run()
        stage.now += 5.0
        step = stage.core.calibrate(stage.now)
        assert step is not None and stage.core.calibrate(stage.now) is None
        stage.arrive(f"waits-for-calibration-{n}")
        assert not stage.plan() and not stage.launched
        stage.now += stage.took(step)
        stage.core.calibrated([(step, stage.took(step))] if n != 3 else [], stage.now)
        stage.run()
    return stage.run()


def debts() -> list[str]:
    """Other replicas serve one tenant, then another that is new here, and then fewer of them are left."""
    stage = StagedCore(CoreConfig(), max_num_seqs=2)
    for number in range(12):
        for tenant in "ab":
            stage.arrive(f"{tenant}-{number}", 8, 4, tenant=tenant)
    stage.steps(4)
    charged, apart = stage.core.share.account("a").charged, stage.core.credit("a") - stage.core.credit("b")
    stage.core.debts_changed({"a": 0.03125}, 4, stage.now)
    assert stage.core.share.account("a").charged == charged, "it is charged where it was served"
    assert stage.core.credit("a") - stage.core.credit("b") < apart - 0.03
    for number, served in enumerate((0.125, 0.25, 0.0625, 0.5)):
        stage.steps(5)
        stage.core.debts_changed({"a": served, "c": 0.5}, 4 - number, stage.now)
    stage.arrive("c-0", 8, 4, tenant="c")
    stage.run()
    return stage.lines
