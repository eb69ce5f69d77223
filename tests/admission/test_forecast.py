from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.controller import Controller
from admission.core import ORDERS, PRIOR_STEP_TIME, CoreConfig, Overload, make_core
from admission.departures import Departures
from admission.forecast import Forecast
from admission.ledger import work_of
from admission.outcome import DeadlineInfeasible
from admission.output_length import OutputLengths
from admission.step_times.step_time import StepTime, StepTimeModel, StepWork
from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockNames
from backend.scheduler.sequence import Sequence
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence
from tests.examples import examples

STEP = StepTime((0.01, 1e-5, 1e-5, 0.0, 0.0, 0.0, 0.0))
LONG, SHORT = 1000, 8
SLOTS = 8


def running(name: str, max_tokens: int, generated: int = 0, tenant: str = "t") -> Sequence:
    sequence = make_sequence(name, tenant, 1, max_tokens)
    sequence.output = [0] * generated
    sequence.num_computed_tokens = 1
    return sequence


def looking(sequences: list[Sequence], step: int = 0, lengths: OutputLengths | None = None) -> Departures:
    departures = Departures(lengths or OutputLengths(), SLOTS, 512)
    departures.follow({sequence.id: sequence for sequence in sequences}, step)
    return departures


def test_of_answers_that_nothing_is_known_of_none_is_expected_to_end_early() -> None:
    alike = [running(str(n), LONG) for n in range(SLOTS)]
    assert looking(alike).steps_until(1, 0, 0, LONG) == LONG
    assert looking(alike).steps_until(SLOTS, (SLOTS - 1) * LONG, 0, LONG) == LONG


def test_the_first_of_many_answers_ends_long_before_the_typical_one() -> None:
    lengths = OutputLengths()
    for length in range(10, 1000, 10):
        lengths.observe("t", LONG, length)
    alone, many = ([running(str(n), LONG) for n in range(count)] for count in (1, SLOTS))
    first, last = (looking(many, lengths=lengths).steps_until(k, 500.0 * (k - 1), 0, 500.0) for k in (1, SLOTS))
    assert 30 < first < 130, "an eighth of the way, more or less"
    assert 350 < looking(alone, lengths=lengths).steps_until(1, 0.0, 0, 500.0) < 650
    assert 500 < last < 850, "those that take their slots end as well: alone, eight would take 940 steps"


def test_short_answers_share_the_slot_that_comes_free() -> None:
    sequences = [running(str(n), 1000) for n in range(SLOTS - 1)] + [running("soon", 100)]
    departures = looking(sequences)
    assert departures.steps_until(6, 5 * 10.0, 0, 10.0) < 150
    assert departures.steps_until(6, 5 * 600.0, 0, 600.0) == 1000


def test_an_answer_that_outlives_its_expected_length_is_expected_as_long_as_others_that_did() -> None:
    lengths = OutputLengths()
    for length in [20] * 90 + [900] * 10:
        lengths.observe("t", LONG, length)
    one = running("1", LONG)
    departures = looking([one], lengths=lengths)
    assert departures.steps_until(1, 0.0, 0, 100.0) == 20
    one.output = [0] * 30
    departures.follow({"1": one}, 30)
    assert departures.steps_until(1, 0.0, 0, 100.0) == 900 - 30


def test_a_sequence_that_has_left_is_expected_no_more() -> None:
    early, late = running("1", 100), running("2", 500)
    departures = looking([early, late])
    assert departures.steps_until(1, 0.0, 0, 100.0) == 100
    departures.follow({"2": late}, 60)
    assert departures.steps_until(1, 0.0, 0, 100.0) == 500 - 60
    departures.follow({"3": running("3", 50), "2": late}, 60)
    assert departures.steps_until(1, 0.0, 0, 100.0) == 50


RUNNING = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 300)), max_size=SLOTS)


@settings(deadline=None)
@given(
    RUNNING,
    st.lists(st.integers(1, 400), max_size=30),
    st.tuples(st.floats(0.1, 500), st.floats(0, 1e5)),
    st.tuples(st.floats(0, 50), st.floats(0, 1e4)),
    st.integers(0, 8),
    st.floats(1, 500),
)
def test_more_ahead_is_never_sooner_and_more_free_slots_are_never_later(
    some: list[tuple[int, int]],
    known: list[int],
    ahead: tuple[float, float],
    more: tuple[float, float],
    free: int,
    length: float,
) -> None:
    lengths = OutputLengths()
    for one in known:
        lengths.observe("t", 512, one)
    departures = looking([running(str(n), most, done) for n, (most, done) in enumerate(some)], 7, lengths)
    lacking, work = ahead
    free = free if some else max(free, 1)
    steps = departures.steps_until(lacking, work, free, length)
    assert 0 <= steps <= departures.steps_until(lacking + more[0], work + more[1], free, length)
    assert departures.steps_until(lacking, work, free + 1, length) <= steps


class Machine(ClockedCore):
    """A machine of eight slots."""

    def __init__(self) -> None:
        engine = EngineConfig(num_blocks=2048, max_model_len=4096, max_num_seqs=SLOTS)
        core = make_core(CoreConfig(), engine, StepTimeModel(STEP))
        super().__init__(core, lambda step: STEP.seconds(work_of(step)))
        self._names = count()

    def arrive(self, tokens: int, level: int = 0, tenant: str = "a", **fields: object) -> Sequence:
        fields |= {"priority_class": level, "first_token_target": 2.0}
        return self.add(make_sequence(str(next(self._names)), tenant, 20, tokens, **fields))

    def told(self, sequence: Sequence) -> float:
        """Seconds until its first token, as it was promised."""
        seconds = self.core.ledger.promises[sequence].first_token
        assert seconds is not None
        return seconds

    def fill(self, level: int = 0) -> None:
        """Let as many long answers begin as there are slots, and one wait."""
        for _ in range(SLOTS + 1):
            self.arrive(LONG, level)
            self.steps(3)

    def first_token_of(self, sequence: Sequence) -> float:
        """Seconds from its arrival."""
        while not sequence.output:
            self.step()
        return self.now - sequence.arrival


@pytest.mark.parametrize("known", [False, True])
def test_nine_long_streams_on_eight_slots_and_a_newcomer_is_told_so(known: bool) -> None:
    """It was told the time of its prompt, with or without knowledge of lengths of answers."""
    machine = Machine()
    if known:
        finished = [machine.arrive(LONG) for _ in range(SLOTS)]
        while not all(len(each.output) == LONG for each in finished):
            machine.step()
    machine.fill()
    newcomer = machine.arrive(SHORT)
    told = machine.told(newcomer)
    true = machine.first_token_of(newcomer)
    assert true > 9 and 0.9 * true < told < 1.5 * true


def test_of_another_tenant_a_newcomer_has_a_slot_at_once_and_is_told_so() -> None:
    machine = Machine()
    machine.fill()
    newcomer = machine.arrive(SHORT, tenant="b")
    assert max(machine.told(newcomer), machine.first_token_of(newcomer)) < 0.1


def test_a_deadline_that_no_slot_comes_free_for_is_refused() -> None:
    machine = Machine()
    machine.fill()
    with pytest.raises(DeadlineInfeasible) as refusal:
        machine.arrive(SHORT, first_token_by=machine.now + 5.0)
    assert refusal.value.estimate > 5
    machine.arrive(SHORT, first_token_by=machine.now + 60.0)


def test_those_due_later_wait_for_slots_too() -> None:
    """By their prefill alone, all would seem to be in time behind any newcomer."""
    machine = Machine()
    for _ in range(SLOTS):
        machine.arrive(300)
    machine.steps(3)
    later = [machine.arrive(SHORT, first_token_by=machine.now + deadline) for deadline in (7, 8, 9)]
    asked = make_sequence("asked", "a", 20, SHORT, first_token_by=machine.now + 6)
    behind = machine.core.control.forecaster.of(asked, 0, machine.now).behind
    assert behind.sequences == later and behind.first_tokens == sorted(behind.first_tokens)
    assert behind.first_tokens[0] > 2, "no slot comes free before"


def test_cached_prompt_tokens_shorten_its_own_forecast_and_the_wait_of_others() -> None:
    """STEP has 10 us a token of prefill: of 3,200 tokens, 32 ms; steps beside it take 10 ms each."""
    names = BlockNames(b"secret", 16)

    def prompt(machine: Machine, name: str, **fields: object) -> Sequence:
        sequence = make_sequence(name, "a", list(range(3200)), SHORT, cache_root=names.root("a"), **fields)
        names.name(sequence, 200)
        return machine.add(sequence)

    machine = Machine()
    assert machine.first_token_of(prompt(machine, "first", first_token_target=2.0)) > 0.03
    machine.steps(20)
    machine.fill()
    machine.told(machine.arrive(SHORT, tenant="b"))
    uncached = make_sequence("other", "a", 3200, SHORT, first_token_target=2.0)
    cached = prompt(machine, "again", first_token_target=2.0)
    assert cached.num_found_tokens == 3184 and machine.core.backlog.of("a").tokens < 200
    assert machine.told(machine.add(uncached)) > machine.told(cached) + 0.03
    with pytest.raises(DeadlineInfeasible):
        prompt(machine, "late", first_token_by=machine.now + 0.01)
    machine.finish(cached)
    machine.scheduler.check_integrity()
    idle = machine.scheduler.kv_manager.cache.num_idle
    assert idle >= 199, "nothing is kept for who was refused or has left"


def test_urgent_work_takes_the_slot_of_a_lower_class_and_is_told_so() -> None:
    machine = Machine()
    machine.fill(level=1)
    urgent, patient = machine.arrive(SHORT, tenant="b"), machine.arrive(SHORT, level=1)
    assert machine.told(urgent) < 0.5 and machine.told(patient) > 5
    assert machine.first_token_of(urgent) < 0.5


def test_of_answers_that_all_wait_each_takes_its_turn_at_a_slot() -> None:
    """Slots that are free now come free again: eight at a time."""
    machine = Machine()
    expected = [machine.told(machine.arrive(100, tenant="a")) for _ in range(4 * SLOTS)]
    assert expected == sorted(expected) and expected[SLOTS - 1] < 0.2
    for batch in (1, 2, 3):
        assert expected[batch * SLOTS] > 0.25 * batch * 100 * STEP.coefficients[0], "nothing is known of their lengths"


ENGINE = EngineConfig(num_blocks=4096, max_model_len=8192, max_num_seqs=32, prefill_chunk=512)
NOW = 10.0

Waiting = tuple[str, int, int]
WAITING = st.tuples(st.sampled_from("abcdef"), st.integers(1, 3000), st.integers(0, 2))


def sequence(name: str, tenant: str, prompt: int, level: int = 0, deadline: float | None = None) -> Sequence:
    return make_sequence(name, tenant, prompt, 100, arrival=NOW, priority_class=level, first_token_by=deadline)


def core_with(waiting: list[Waiting], steps: int = 0, order: str = "fair") -> Controller:
    """The first of them came first; then some steps were planned and are in flight."""
    core = make_core(replace(CoreConfig(), order=order, overload=Overload.UNBOUNDED), ENGINE)
    for n, (tenant, prompt, level) in enumerate(waiting):
        core.arrive(sequence(str(n), tenant, prompt, level), 0.1 * n)
    for _ in range(steps):
        core.schedule(NOW)
    return core


def forecast(core: Controller, asked: Sequence) -> Forecast:
    return core.control.forecaster.of(asked, 0, NOW)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=examples(50, at_night=1000), deadline=None)
@given(st.lists(WAITING, max_size=25), WAITING, WAITING, st.sampled_from([None, NOW + 5.0]), st.integers(0, 2))
def test_more_backlog_never_lowers_a_forecast(
    order: str, waiting: list[Waiting], more: Waiting, newcomer: Waiting, deadline: float | None, steps: int
) -> None:
    core, asked = core_with(waiting, steps, order), sequence("asked", *newcomer, deadline)
    before = forecast(core, asked)
    added = sequence("more", *more)
    core.scheduler.add(added)
    after = forecast(core, asked)
    # of a tenant's requests in all it is known what they cost, and not which of them its share computes first
    least = 0.9 if order == "fair" else 1 - 1e-9
    assert after.first_token >= least * before.first_token and after.last_token >= least * before.last_token


def decoding(core: Controller) -> float:
    """Expected seconds from a newcomer's first token to its last, the 100th."""
    expected = forecast(core, sequence("asked", "other", 10))
    return expected.last_token - expected.first_token


def test_an_answer_on_an_idle_machine_is_expected_in_steps_of_its_own() -> None:
    own = PRIOR_STEP_TIME.seconds(StepWork(decode_tokens=1, decode_context=10))
    assert decoding(core_with([])) == pytest.approx(99 * own)


def test_an_answer_is_expected_in_full_steps_while_prompts_wait_and_then_in_such_as_were_lately() -> None:
    few, many = (core_with([("a", 8000, 0)] * count) for count in (4, 500))
    idle, full = decoding(core_with([])), decoding(many)
    full_step = few.scheduler.budget.tokens
    assert full == pytest.approx(99 * PRIOR_STEP_TIME.seconds(StepWork(full_step, 0, 0, 5, full_step * 5)))
    share = 4 * 8000 / full_step / 99
    assert decoding(few) == pytest.approx(share * full + (1 - share) * idle)
    few._pipeline.typical = idle / 99 * 2
    assert decoding(few) == pytest.approx(share * full + (1 - share) * 2 * idle)
    few._pipeline.typical = full
    assert decoding(few) == pytest.approx(full), "no step is expected to be more than full"
