from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config import Batching
from backend.scheduler.prefill_order import PASSED_OVER
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence
from tests.backend.scheduler.bench import Bench
from tests.examples import examples

BUDGET = 16
ROOMY = {"num_blocks": 400, "max_model_len": 200, "max_num_seqs": 12, "max_num_batched_tokens": BUDGET}


def roomy(**changes: object) -> Bench:
    """A bench where memory and slots never bind, a prompt may fill a step, and one step is in flight."""
    return Bench(**(ROOMY | {"prefill_chunk": BUDGET, "steps_in_flight": 1} | changes))


def prefilled(bench: Bench) -> dict[str, int]:
    """The tokens of prompts in the last step, by who has them, in the order of its rows."""
    step = bench.scheduler.in_flight[-1]
    start = step.batch.num_decodes
    return {s.id: length for s, length in zip(step.sequences[start:], step.batch.lengths[start:], strict=True)}


def begun(bench: Bench, tokens: int, **fields: object) -> Sequence:
    """A sequence whose prefill has begun."""
    sequence = bench.add(tokens, 2)
    for name, value in fields.items():
        setattr(sequence, name, value)
    bench.step()
    assert 0 < sequence.num_computed_tokens < tokens
    return sequence


def test_short_prompts_go_before_the_rest_of_a_long_one_of_their_class() -> None:
    bench = roomy()
    long = begun(bench, 128)
    shorts = [bench.add(4, 2) for _ in range(5)]
    bench.plan()
    assert prefilled(bench) == {short.id: 4 for short in shorts[:4]}
    bench.complete()
    bench.plan()
    assert prefilled(bench) == {shorts[4].id: 4, long.id: BUDGET - 4 - 4}, "beside the tokens of four decodes"
    bench.drain()


def test_a_prompt_waits_for_no_more_later_ones_than_its_share() -> None:
    bench = roomy(prefill_overtaking=0.25)
    long = begun(bench, 64)
    shorts = [bench.add(8, 2) for _ in range(4)]
    bench.plan()
    assert prefilled(bench) == {short.id: 8 for short in shorts[:2]}, "a quarter of 64"
    while not shorts[2].num_computed_tokens:
        assert not shorts[3].num_computed_tokens
        bench.step()
    assert long.num_computed_tokens == 64
    bench.drain()


def test_what_has_as_much_left_waits_and_what_is_nearly_done_is_not_overtaken() -> None:
    bench = roomy(prefill_overtaking=2.0)
    long = begun(bench, 20)
    other = bench.add(4, 2)
    bench.plan()
    assert list(prefilled(bench)) == [long.id, other.id]
    bench.drain()


def test_a_prompt_goes_before_one_that_went_before_another() -> None:
    bench = roomy(prefill_overtaking=1.0)
    prompts = [begun(bench, tokens) for tokens in (160, 100, 50)]
    bench.add(10, 2)
    bench.plan()
    shortest = bench.scheduler.in_flight[-1].sequences[0]
    assert len(shortest.prompt) == 10
    while prompts[2].num_computed_tokens < 50:
        assert prompts[0].num_computed_tokens == prompts[1].num_computed_tokens == BUDGET
        bench.step()
    bench.drain()


@pytest.mark.parametrize("changes", [{"prefill_overtaking": 0.0}, {"batching": Batching.STATIC}], ids=str)
def test_without_overtaking_prompts_are_computed_as_they_were_admitted(changes: dict[str, object]) -> None:
    bench = roomy(**changes)
    long = begun(bench, 64)
    bench.add(4, 2)
    bench.plan()
    assert prefilled(bench) == {long.id: BUDGET}
    bench.drain()


def test_a_more_urgent_class_goes_first_whatever_its_length() -> None:
    bench = roomy()
    lower = begun(bench, 64, priority_class=1)
    urgent = bench.add(128, 2)
    bench.plan()
    assert prefilled(bench) == {urgent.id: BUDGET}
    bench.complete()
    shorter = bench.add(4, 2)
    shorter.priority_class = 1
    while urgent.num_computed_tokens < 128:
        assert not shorter.num_computed_tokens
        bench.step()
    assert lower.num_computed_tokens < 64
    bench.drain()


@dataclass
class Clock:
    """In time by a number of tokens."""

    tokens: float
    asked: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, sequence: Sequence, due: float, scheduled: ScheduledStep, room: int) -> float:
        self.asked.append((due, room))
        return self.tokens


@pytest.mark.parametrize(("tokens", "yields"), [(115.0, False), (116.0, True)])
def test_a_prompt_waits_for_none_that_would_make_it_late(
    monkeypatch: pytest.MonkeyPatch, tokens: float, yields: bool
) -> None:
    bench, clock = roomy(), Clock(tokens)
    monkeypatch.setattr(bench.scheduler.hooks, "prefill_in_time", clock)
    long = begun(bench, 128, first_token_by=50.0)
    short = bench.add(4, 2)
    bench.plan()
    assert prefilled(bench) == ({short.id: 4, long.id: BUDGET - 4} if yields else {long.id: BUDGET})
    assert clock.asked[0] == (50.0, BUDGET)
    bench.drain()


@pytest.mark.parametrize(("due", "goes_first"), [(4.0, True), (5.0, False), (6.0, False)])
def test_of_two_that_press_a_long_one_goes_first_if_it_is_due_earlier(due: float, goes_first: bool) -> None:
    bench = roomy(prefill_overtaking=0.25)
    running = begun(bench, 64, first_token_by=5.0)
    heads = [bench.add(tokens, 2) for tokens in (100, 4)]
    for head in heads:
        head.first_token_by = due
    bench.plan()
    assert next(iter(prefilled(bench))) == (heads[0].id if goes_first else running.id)
    bench.drain()


@pytest.mark.parametrize(("tokens", "yields"), [(51.0, False), (52.0, True)])
def test_of_two_that_press_a_short_one_goes_first_where_the_other_stays_in_time(
    monkeypatch: pytest.MonkeyPatch, tokens: float, yields: bool
) -> None:
    bench = roomy(prefill_overtaking=0.25)
    running = begun(bench, 64, first_token_by=5.0)
    monkeypatch.setattr(bench.scheduler.hooks, "prefill_in_time", Clock(tokens))
    short = bench.add(4, 2)
    short.first_token_by = 6.0
    bench.plan()
    assert next(iter(prefilled(bench))) == (short.id if yields else running.id)
    bench.drain()


def test_the_prompts_before_a_newcomer_are_those_that_do_not_wait_for_it() -> None:
    bench = roomy(prefill_overtaking=0.25)
    lower, running = begun(bench, 100, priority_class=1), begun(bench, 128)
    bench.plan()
    newcomer, before = bench.add(4, 2), bench.scheduler.prefilling_before
    assert [before(newcomer, left, BUDGET) for left in (4, 32, 33)] == [[], [], [running]]
    newcomer.priority_class = 1
    assert before(newcomer, 4, BUDGET) == [running], "and the one of its own class waits"
    assert lower.num_computed_tokens < 100
    newcomer.first_token_by = 1.0
    assert before(newcomer, 33, BUDGET) == [running], "however much it presses"
    newcomer.priority_class = 0
    assert before(newcomer, 33, BUDGET) == []
    bench.drain()


def test_who_outranks_a_prompt_goes_before_it_whatever_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = roomy(prefill_overtaking=0.0001)
    running = begun(bench, 64, first_token_by=1.0)
    head = bench.add(100, 2)
    monkeypatch.setattr(bench.scheduler.hooks, "outranks", lambda one, other: (one, other) == (head, running))
    bench.plan()
    assert list(prefilled(bench)) == [head.id]
    later = bench.add(4, 2)
    assert set(bench.scheduler.prefilling_before(later, 4, BUDGET)) == {head, running}
    bench.drain()


def served_by_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch, weights: dict[str, float]) -> list[Sequence]:
    """Has tenants' service be the tokens of their prompts that were computed; returns the list of all sequences."""
    known: list[Sequence] = []

    def served(tenant: str) -> float:
        return sum(s.num_computed_tokens for s in known if s.tenant == tenant) / weights.get(tenant, 1.0)

    def prefill_cost(sequence: Sequence, tokens: int) -> float:
        return tokens / weights.get(sequence.tenant, 1.0)

    monkeypatch.setattr(bench.scheduler.hooks, "served", served)
    monkeypatch.setattr(bench.scheduler.hooks, "prefill_cost", prefill_cost)
    return known


def test_one_tenants_prompts_side_by_side_do_not_keep_anothers_until_all_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = roomy(prefill_chunk=2)
    known = served_by_tokens(bench, monkeypatch, {})
    known += [bench.add(64, 2, "many") for _ in range(8)]
    bench.step()
    known.append(one := bench.add(64, 2, "one"))
    steps, computed = 0, 0
    while one.num_computed_tokens < 64:
        bench.step()
        steps += 1
        computed += not one.num_computed_tokens
    assert computed <= 64 // BUDGET + 1, "until the other tenant was served as much more"
    assert steps <= computed + 64 // 2 + 1, "and then it has its chunk of each step"
    bench.drain()


@pytest.mark.parametrize(("weight", "goes_first"), [(1.0, False), (4.0, True)])
def test_a_weight_counts_in_what_tenants_were_served(
    monkeypatch: pytest.MonkeyPatch, weight: float, goes_first: bool
) -> None:
    bench = roomy(prefill_overtaking=0.1, max_num_seqs=4)
    known = served_by_tokens(bench, monkeypatch, {"heavy": weight})
    known.append(long := begun(bench, 190))
    known.append(other := bench.add(80, 2, "heavy"))
    for _ in range(4):
        bench.step()
    assert bool(other.num_computed_tokens) is goes_first
    assert long.num_computed_tokens < 190
    bench.drain()


def test_who_is_pressing_or_outranks_is_not_overtaken_for_what_its_tenant_was_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for changes in ({"first_token_by": 2.5}, {"outranks": True}):
        bench = roomy(prefill_overtaking=0.1, max_num_seqs=4)
        known = served_by_tokens(bench, monkeypatch, {"other": 100.0})
        if changes.pop("outranks", None):
            monkeypatch.setattr(bench.scheduler.hooks, "outranks", lambda one, _: one.tenant == "t")
        known.append(long := begun(bench, 190, **changes))
        known.append(bench.add(40, 2, "other"))
        while long.num_computed_tokens < 190:
            assert not known[1].num_computed_tokens
            bench.step()
        bench.drain()


@pytest.mark.parametrize("chunk", [BUDGET, 4])
def test_the_prompt_admitted_first_progresses_under_a_flood_of_a_more_urgent_class(chunk: int) -> None:
    bench = roomy(prefill_chunk=chunk, max_num_seqs=14)
    lower = bench.add(64, 2)
    lower.priority_class = 1
    bench.step()
    steps, at = 0, lower.num_computed_tokens
    while not lower.output:
        while len(bench.scheduler.waiting) < 8:
            bench.add(40, 1)
        bench.step()
        steps += 1
        assert steps < (64 // chunk + 1) * (PASSED_OVER + 2), f"{lower.num_computed_tokens} of 64 tokens, {at} at first"
    for waiting in list(bench.scheduler.running.values()):
        bench.scheduler.finish(waiting, FinishReason.CANCELLED)
    bench.drain()


def test_a_step_that_was_lost_leaves_everyone_a_place() -> None:
    bench = roomy(steps_in_flight=2)
    begun(bench, 40)
    for tokens in (8, 4):
        bench.add(tokens, 2)
    bench.plan(), bench.plan()
    bench.lose()
    bench.drain()


Event = tuple[int, int]  # steps until it comes, and the tokens of its prompt


@settings(max_examples=examples(100, at_night=2000), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150)), min_size=2, max_size=14),
    st.sampled_from([0.0, 0.25, 0.5, 2.0]),
)
def test_each_waits_for_no_more_than_its_share_and_no_step_has_room_left(events: list[Event], share: float) -> None:
    bench = roomy(prefill_overtaking=share)
    overtaken: dict[Sequence, int] = {}  # tokens of later ones in steps that left it unfinished
    arrivals = [(sum(wait for wait, _ in events[: n + 1]), tokens) for n, (_, tokens) in enumerate(events)]
    number = 0
    while arrivals or bench.scheduler.has_work:
        while arrivals and arrivals[0][0] <= number:
            bench.add(arrivals.pop(0)[1], 1)
        number += 1
        if bench.plan() is None:
            continue
        step, running = bench.scheduler.in_flight[-1], list(bench.scheduler.running.values())
        unfinished = [s for s in running if s.num_computed_tokens < s.num_admitted_tokens]
        assert sum(step.batch.lengths) == BUDGET if unfinished or bench.scheduler.waiting else True
        for sequence in unfinished:
            later = running[running.index(sequence) + 1 :]
            tokens = sum(prefilled(bench).get(other.id, 0) for other in later)
            overtaken[sequence] = overtaken.get(sequence, 0) + tokens
            assert overtaken[sequence] <= share * len(sequence.prompt)
        bench.complete()
    assert number < 14 * 4 + 14 * 150 // BUDGET
