"""The whole core, any interleaving of events, over a device on paper that checks every context it is given."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import astuple, replace
from itertools import count
from math import isclose
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from admission.core import ORDERS, PRIOR_STEP_TIME, CoreConfig, MemoryGate
from admission.event_logs.event_log import make_logged_core, replay
from admission.ledger import EngineTimeTariff
from admission.outcome import QueueFull
from admission.prefill_sizer import PrefillSizer
from admission.step_times.step_time import CopyTime, Pipeline, StepTimeModel, StepWork
from backend.calibration_steps import CalibrationStep
from backend.config import EngineConfig
from backend.scheduler.batch import NO_TOKEN, Batch, StepOutput
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from labs.simulation.fairness_monitor import FairnessMonitor
from tests.backend.paper_device import PaperDevice, continuation
from tests.backend.sequences import make_sequence

END = 3
MAX_WAITING = 12
MOST_STEPS = 2_000  # that serve what a machine can have waiting
NAMES = {"a": "c", "b": "a", "c": "b"}  # of the twin's tenants


def small_engine(num_blocks: int, depth: int, chunk: int | None, most: int) -> EngineConfig:
    """A machine that runs out of memory; `most`: preemptions of one sequence."""
    tokens, budget = min(20, num_blocks * 4), 20 if chunk is None else 8
    return EngineConfig(num_blocks, tokens, 4, 4, budget, chunk, steps_in_flight=depth, max_preemptions=most)


ENGINES = st.builds(
    small_engine,
    st.integers(5, 16),
    st.integers(1, 2),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([1, 3]),
)
CONFIGS = st.builds(
    CoreConfig,
    order=st.sampled_from([*ORDERS, *["fair"] * len(ORDERS)]),
    memory=st.sampled_from(list(MemoryGate)),
    prefill_share=st.sampled_from([0.3, 1.0]),
    max_waiting=st.just(MAX_WAITING),
    weights=st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from([1.0, 2.0]))),
)
times = st.integers(0, 192).map(lambda n: n / 64)  # seconds, which can be shifted without rounding


class CoreMachine(RuleBasedStateMachine):
    """Holds a recorded core to the invariants of scheduling, by number:

    1. blocks are free or owned, and all free in the end; 2. nobody waits without a named reason; 3. the fairness bound;
    4. counters never go down, charges sum to the busy time; 5. preemptions bounded; 7. cancelling is idempotent, and
    releases memory with the last step in flight that names the sequence; 8. one end each, contiguous tokens, the same
    ones however often they are recomputed; 9. steps within the budget, which is smaller once one was lost, a token for
    every decode; 10. more work never looks shorter; 11. other names, another clock, scaled weights change nothing; 12.
    a replay decides the same to the byte.

    Invariant 6 is about quotas, which the core does not know.
    """

    @initialize(engine=ENGINES, config=CONFIGS)
    def start(self, engine: EngineConfig, config: CoreConfig) -> None:
        self.engine, self.config = engine, config
        self.model = StepTimeModel(PRIOR_STEP_TIME)
        self.log: list[str] = []
        self.core = make_logged_core(self.config, self.engine, self.model, self.log.append)[0]
        self.scheduler = self.core.scheduler
        self.monitor = FairnessMonitor(self.core) if config.order == "fair" else None
        self.twin = Twin(self.config, self.engine, NAMES)
        self.device = PaperDevice(self.engine.block_size)
        self.flying: deque[Batch] = deque()
        self.sequences: list[Sequence] = []
        self.ended_early: dict[Sequence, int] = {}
        self.ends: Counter[Sequence] = Counter()
        self.tokens: Counter[Sequence] = Counter()
        self.now = self.busy = 0.0
        self.calibrating: CalibrationStep | None = None
        self.names = count()
        self.totals = astuple(self.scheduler.counters)

    # events

    @rule(
        tenant=st.sampled_from(list(NAMES)),
        level=st.integers(0, 2),
        prompt=st.integers(1, 14),
        output=st.integers(1, 8),
        interval=st.sampled_from([None, 1e-9, 0.1]),
    )
    def arrive(self, tenant: str, level: int, prompt: int, output: int, interval: float | None) -> None:
        n = next(self.names)
        tokens = [n + 10 + i for i in range(prompt)]
        most = min(output, self.engine.max_model_len - prompt)
        sequence = make_sequence(f"s{n}", tenant, tokens, most, [END], priority_class=level, token_interval=interval)
        try:
            self.core.arrive(sequence, self.now)
            self.sequences.append(sequence)
        except QueueFull as refusal:
            assert refusal.waiting >= MAX_WAITING  # noqa: PT017 - more when preempted ones have come back
        assert self.twin.arrive(sequence, self.now) == (sequence in self.sequences)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.status is not SequenceStatus.FINISHED:
            self.end_early(sequence)
        self.core.finish_sequence(sequence, FinishReason.CANCELLED, self.now)
        self.twin.finish(sequence, FinishReason.CANCELLED, self.now)
        if self.monitor:
            self.monitor.update()

    @rule(seconds=times)
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def plan(self) -> None:
        may_plan = len(self.scheduler.in_flight) < self.engine.steps_in_flight
        batch = self.core.schedule(self.now)
        assert self.twin.plan(self.now) == batch, "other names, times or weights changed a plan"
        if batch is not None:
            assert self.calibrating is None, "a step beside one of calibration"
            self.check_step(batch)
            self.flying.append(batch)
        elif may_plan and not self.calibrating and len(self.scheduler.waiting):
            assert self.scheduler.wait_reason is not None or self.scheduler.preempted, "somebody waits for no reason"
        ended = self.core.take_ended()
        assert self.twin.take_ended() == [sequence.id for sequence in ended]
        for sequence in ended:
            assert sequence.num_preemptions == self.engine.max_preemptions
            self.end_early(sequence)
        if self.monitor:
            self.monitor.update()

    @rule()
    def calibrate(self) -> None:
        """The device runs a step for what it takes, if it has nothing else to do."""
        step = self.core.calibrate(self.now)
        assert self.twin.calibrate(self.now) == step
        if step is not None:
            assert self.calibrating is None, "one at a time"
            assert not self.flying and all(s.status is SequenceStatus.FINISHED for s in self.sequences)
            self.calibrating = step

    @precondition(lambda self: self.calibrating)
    @rule(seconds=st.floats(0.0001, 2), is_lost=st.booleans())
    def calibrated(self, seconds: float, is_lost: bool) -> None:
        assert self.calibrating is not None
        measured = [] if is_lost else [(self.calibrating, seconds)]
        self.calibrating = None
        self.core.calibrated(measured, self.now)
        self.twin.calibrated(measured, self.now)

    @precondition(lambda self: self.flying)
    @rule(elapsed=st.floats(0.001, 2), failed=st.sampled_from((0, 0, 0, 1, 2)), forced=st.sampled_from((0, 0, 1, 2, 5)))
    def complete(self, elapsed: float, failed: int = 0, forced: int = 0) -> None:
        """The oldest step is done; the model computed no numbers for its first rows, and grammars force
        tokens after those of others.
        """
        batch = self.flying.popleft()
        computed = self.device.execute(batch)
        tokens = [NO_TOKEN] * min(failed, len(computed.token_ids)) + computed.token_ids[failed:]
        output = StepOutput(
            computed.step, tokens, elapsed, forced=self.device.forced(batch, forced) if forced else None
        )
        self.busy += elapsed
        new_tokens = self.core.update_from_output(output, self.now)
        assert self.twin.complete(output, self.now) == [(s.id, token, reason) for s, token, reason in new_tokens]
        self.take(new_tokens)
        if self.monitor:
            self.monitor.completed()
            self.monitor.check()

    @precondition(lambda self: self.flying)
    @rule()
    def lose(self) -> None:
        """The device has no memory for the oldest step in flight."""
        lost = list(self.flying)
        self.flying.clear()
        assert self.core.rollback(self.now) == self.twin.lost(self.now)
        assert not self.scheduler.in_flight
        assert self.scheduler.budget.tokens <= max(1, sum(lost[0].lengths) // 2)
        assert len(self.scheduler.running) <= self.scheduler.budget.tokens
        if self.monitor:
            self.monitor.completed()

    # what follows from events

    def end_early(self, sequence: Sequence) -> None:
        self.ended_early[sequence] = len(sequence.output)
        self.ends[sequence] += 1

    def take(self, new_tokens: list[NewToken]) -> None:
        for sequence, token, reason in new_tokens:
            assert not self.ends[sequence], "a token came after the end"
            if token == NO_TOKEN:
                self.fail(sequence)
                continue
            assert sequence.output[self.tokens[sequence]] == token, "tokens are not contiguous"
            self.tokens[sequence] += 1
            self.ends[sequence] += reason is not None

    def fail(self, sequence: Sequence) -> None:
        """End it as the engine does."""
        self.end_early(sequence)
        self.core.finish_sequence(sequence, FinishReason.FAILED, self.now)
        self.twin.finish(sequence, FinishReason.FAILED, self.now)

    def check_step(self, batch: Batch) -> None:
        assert batch.slots, "an empty step was planned"
        assert sum(batch.lengths) <= self.scheduler.budget.tokens <= self.engine.max_num_batched_tokens
        self.check_decodes(batch)
        admitted = self.scheduler.in_flight[-1].admitted
        if self.monitor:
            self.monitor.planned(admitted)

    def check_decodes(self, batch: Batch) -> None:
        """Within a step each running sequence past its prefill and with memory gets a token."""
        for sequence in self.scheduler.running.values():
            decoding = sequence.num_admitted_tokens <= sequence.num_computed_tokens < sequence.num_tokens
            has_memory = sequence.num_computed_tokens < len(sequence.block_table.blocks) * self.engine.block_size
            done = sequence.num_tokens == sequence.request.most_tokens
            assert not (decoding and has_memory and not done) or sequence.last_step == batch.step

    # at any time

    @precondition(lambda self: hasattr(self, "core"))
    @invariant()
    def memory_is_conserved_and_released_with_the_last_step_that_names_a_sequence(self) -> None:
        self.scheduler.check_integrity()
        named = {sequence for scheduled in self.scheduler.in_flight for sequence in scheduled.sequences}
        for sequence in self.ends:
            if sequence.status is SequenceStatus.FINISHED:
                assert (sequence.slot >= 0) == (sequence in named)
                assert sequence in named or not sequence.block_table.blocks

    @precondition(lambda self: hasattr(self, "core"))
    @invariant()
    def counters_never_go_down(self) -> None:
        totals = astuple(self.scheduler.counters)
        assert all(new >= old for new, old in zip(totals, self.totals, strict=True))
        self.totals = totals

    @precondition(lambda self: hasattr(self, "core"))
    @invariant()
    def nobody_is_preempted_too_often(self) -> None:
        assert all(s.num_preemptions <= self.engine.max_preemptions for s in self.sequences)

    # in the end

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.drain()
        assert self.scheduler.kv_manager.pool.num_free == self.engine.num_blocks
        for sequence in self.sequences:
            self.check_end(sequence)
        self.check_account()
        more_work_never_looks_shorter(self.model, self.engine)
        assert len(list(replay(self.log))) == len(self.log)

    def drain(self) -> None:
        if self.calibrating:
            self.calibrated(0.001, is_lost=False)
        steps = 0
        while self.scheduler.has_work:
            steps += 1
            assert steps < MOST_STEPS, "a livelock"
            while True:
                before = len(self.flying)
                self.plan()
                if len(self.flying) == before:
                    break
            assert self.flying or not self.scheduler.in_flight, "a step in flight was not computed"
            if self.flying:
                self.complete(0.5, forced=self.flying[0].step % 4)

    def check_end(self, sequence: Sequence) -> None:
        assert self.ends[sequence] == 1, "everyone ends once"
        if sequence in self.ended_early:
            assert len(sequence.output) == self.ended_early[sequence], "a token came after the end"
        else:
            assert sequence.output == continuation(sequence.request.prompt, sequence.request.max_tokens, END)

    def check_account(self) -> None:
        """Everything prepaid is settled, and in engine time the charges are the time the device was busy."""
        assert not self.core.ledger.promises
        charged = sum(account.charged for account in self.core.share.accounts.values())
        assert isclose(charged, self.busy, rel_tol=1e-9, abs_tol=1e-9)


SHIFT = 4096.0  # seconds; exact in floating point, as long as times are multiples of a power of two
SCALE = 2.0


class Twin:
    """A core that is given the same run in other words: other names of tenants, a clock set elsewhere, doubled weights.

    `names` has the other name of each tenant.
    """

    def __init__(self, config: CoreConfig, engine: EngineConfig, names: Mapping[str, str]) -> None:
        weights = {"": SCALE} | {names[tenant]: SCALE * weight for tenant, weight in config.weights.items()}
        self._core = make_logged_core(
            replace(config, weights=weights), engine, StepTimeModel(PRIOR_STEP_TIME), lambda line: None
        )[0]
        self._names = names
        self._sequences: dict[str, Sequence] = {}

    def arrive(self, original: Sequence, now: float) -> bool:
        """Whether it was let in."""
        request = original.request
        terms = {"priority_class": request.priority_class, "token_interval": request.token_interval}
        tenant = self._names[original.tenant]
        sequence = make_sequence(original.id, tenant, request.prompt, request.max_tokens, [END], **terms)
        try:
            self._core.arrive(sequence, now + SHIFT)
        except QueueFull:
            return False
        self._sequences[original.id] = sequence
        return True

    def finish(self, original: Sequence, reason: FinishReason, now: float) -> None:
        self._core.finish_sequence(self._sequences[original.id], reason, now + SHIFT)

    def plan(self, now: float) -> Batch | None:
        return self._core.schedule(now + SHIFT)

    def calibrate(self, now: float) -> CalibrationStep | None:
        return self._core.calibrate(now + SHIFT)

    def calibrated(self, measured: list[tuple[CalibrationStep, float]], now: float) -> None:
        self._core.calibrated(measured, now + SHIFT)

    def take_ended(self) -> list[str]:
        return [sequence.id for sequence in self._core.take_ended()]

    def lost(self, now: float) -> bool:
        return self._core.rollback(now + SHIFT)

    def complete(self, output: StepOutput, now: float) -> list[tuple[str, int, FinishReason | None]]:
        new_tokens = self._core.update_from_output(output, now + SHIFT)
        return [(sequence.id, token, reason) for sequence, token, reason in new_tokens]


def more_work_never_looks_shorter(model: StepTimeModel, engine: EngineConfig) -> None:
    """Of a step, of a whole request, and of what prefill leaves to decodes that were promised an interval."""
    random = Random(model.num_steps)
    fitted = model.fitted
    assert all(coefficient >= 0 for coefficient in fitted.coefficients)
    _check_steps(model, random)
    tariff, sizer = EngineTimeTariff(model), PrefillSizer(engine, model, CopyTime(engine, Pipeline()))
    for _ in range(4):
        prompt, output, more = (random.randrange(1, 2000) for _ in range(3))
        least = tariff.estimate(prompt, output)
        assert least <= min(tariff.estimate(prompt + more, output), tariff.estimate(prompt, output + more))
        decodes, context, interval = random.randint(1, 64), random.randrange(10_000), random.uniform(0.001, 0.1)
        prefill = sizer.prefill_budget(decodes, context, interval, 2000).fits(prompt, 2000)
        assert prefill >= sizer.prefill_budget(decodes + 1, context + more, interval, 2000).fits(prompt + more, 2000)


def _check_steps(model: StepTimeModel, random: Random) -> None:
    """A prefill token and a decode more, also at the knee, where the device turns compute-bound."""
    fitted = model.fitted
    _, prefill, decode, context, _, pairs, beyond = fitted.coefficients
    for tokens in (fitted.knee - 1, fitted.knee, random.randrange(4 * fitted.knee)):
        work = StepWork(tokens, 0, random.randrange(1000), random.randrange(1000), random.randrange(100_000))
        seconds = fitted.seconds(work)
        step_up = (prefill + decode + context + pairs + beyond) * (1 + 1e-9) + 1e-9 * seconds
        for added in (StepWork(prefill_tokens=1, prefill_pairs=1), StepWork(decode_tokens=1, decode_context=1)):
            assert seconds <= fitted.seconds(work + added) <= seconds + step_up
