"""When turns come back is learned, and what keeping their blocks is worth follows from it."""

from itertools import count, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.kv.retention import (
    GAP_EDGES_S,
    HINTED_PRIOR,
    NUM_GAP_CELLS,
    TURNS_REMEMBERED,
    UNHINTED_PRIOR,
    MeasuredRetention,
    SurvivalCurve,
)
from backend.paged_kv.block_names import BlockName
from backend.paged_kv.idle_blocks import PLAIN_CHAIN, IdleChain

_ordinals = count()


def chain(expects: float | None, left_at: float, tenant: str = "t") -> IdleChain:
    return IdleChain(tenant, PLAIN_CHAIN, expects, left_at, 1)


def worth(times: MeasuredRetention, expects: float | None, age: float, tenant: str = "t") -> float:
    return times.worth(PLAIN_CHAIN, chain(expects, 0.0, tenant), age)


def learned(gaps: list[tuple[float | None, float | None]], tenant: str = "t") -> MeasuredRetention:
    """What is known after turns, one after another, of each of which a client said a time, and that came back after a
    gap; None: it said nothing, or it did not come back.
    """
    times, now = MeasuredRetention(), 0.0
    for said, gap in gaps:
        name = BlockName(next(_ordinals))
        times.left(chain(said, now, tenant), name)
        if gap is not None:
            times.claim_chain([BlockName(next(_ordinals)), name, BlockName(next(_ordinals))], now + gap)
        now += 100.0
    return times


shares = st.lists(st.integers(0, 20), min_size=NUM_GAP_CELLS, max_size=NUM_GAP_CELLS)


@given(shares, st.lists(st.integers(0, NUM_GAP_CELLS), max_size=40), st.sampled_from([UNHINTED_PRIOR, HINTED_PRIOR]))
def test_worth_is_the_best_chance_for_the_time_kept(back: list[int], away: list[int], prior: list[float]) -> None:
    """As of every time until which a turn may be kept, looked at one by one."""
    curve = SurvivalCurve(prior)
    curve.draw(back, away)
    survival, widths = curve.survival, [GAP_EDGES_S[0]] + [b - a for a, b in pairwise(GAP_EDGES_S)]
    assert all(0 <= after <= before <= 1 for before, after in pairwise(survival))
    for age in range(NUM_GAP_CELLS):
        best = kept = 0.0
        for until in range(age, NUM_GAP_CELLS):
            kept += widths[until] * (survival[until] + survival[until + 1]) / 2
            best = max(best, (survival[age] - survival[until + 1]) / kept if kept else 0.0)
        assert curve.worth[age] == pytest.approx(best, rel=1e-9, abs=1e-15)
        assert 0 <= curve.probability(age) <= 1


def test_before_anything_is_known_the_least_recent_is_worth_least() -> None:
    by_age = [worth(MeasuredRetention(), None, age) for age in GAP_EDGES_S]
    assert by_age == sorted(by_age, reverse=True) and by_age[-1] >= 0


def test_worth_of_a_chain_rises_until_its_usual_return_and_falls_after_it() -> None:
    times = learned([(None, 30.0)] * 60)
    ages = [worth(times, None, age) for age in (1, 12, 20)]
    assert ages == sorted(ages) and ages[2] > 2 * ages[0]
    assert worth(times, None, 100) < ages[0] / 10


def test_a_fast_tool_and_a_slow_one_make_two_humps() -> None:
    random = Random(1)
    times = learned([(None, random.choice((1.0, 45.0))) for _ in range(200)])
    at_once, between, soon = (worth(times, None, age) for age in (0.1, 4.0, 35.0))
    assert at_once > 4 * between and soon > 1.5 * between


def test_of_two_whose_clients_are_right_the_one_that_comes_back_later_is_worth_less() -> None:
    random = Random(2)
    times = learned([(gap, gap) for gap in (random.uniform(1, 60) for _ in range(100))])
    assert worth(times, 5.0, 1.0) > 3 * worth(times, 50.0, 1.0)
    assert worth(times, 50.0, 46.0) > 3 * worth(times, 50.0, 1.0)


@pytest.mark.parametrize("wrong", [3.0, 1 / 3])
def test_a_client_that_is_wrong_by_the_same_factor_each_time_is_as_good_as_one_that_is_right(wrong: float) -> None:
    random = Random(3)
    gaps = [(random.uniform(1, 60), random.lognormvariate(0, 0.2)) for _ in range(200)]
    right, other = learned([(gap, gap * off) for gap, off in gaps]), learned([(g * wrong, g * off) for g, off in gaps])
    for times, factor in ((right, 1.0), (other, wrong)):
        assert worth(times, 5.0 * factor, 1.0) > 3 * worth(times, 50.0 * factor, 1.0)
        assert worth(times, 20.0 * factor, 16.0) > 1.5 * worth(times, 20.0 * factor, 1.0)


def test_a_hint_without_information_is_not_heeded() -> None:
    random = Random(4)
    times = learned([(random.uniform(1, 3600), random.lognormvariate(2, 0.3)) for _ in range(100)])
    assert worth(times, 1.0, 2.0) == worth(times, 3600.0, 2.0)


def test_a_kind_of_chain_that_never_came_back_is_worth_less() -> None:
    times = learned([(None, None), (10.0, 10.0)] * 60)
    assert worth(times, None, 1.0) < worth(times, 10.0, 1.0) / 5
    assert times.probability(chain(None, 0.0), 1.0) < 0.2 and times.probability(chain(10.0, 0.0), 1.0) > 0.8


def test_a_turn_that_has_not_come_back_yet_is_not_taken_for_one_that_never_does() -> None:
    times, names = MeasuredRetention(), [BlockName(next(_ordinals)) for _ in range(60)]
    for n, name in enumerate(names):
        times.left(chain(None, n * 0.01), name)
    for n, name in enumerate(names[::2]):
        times.claim_chain([name], 5.0 + n * 0.01)
    worth(times, None, 1.0)
    assert times.probability(chain(None, 0.0), 1.0) > 0.6


def test_tenants_are_apart_and_what_is_remembered_is_bounded() -> None:
    times = learned([(None, 30.0)] * 60)
    assert worth(times, None, 1.0, "other") == worth(MeasuredRetention(), None, 1.0, "other")
    for _ in range(3 * TURNS_REMEMBERED):
        times.left(chain(None, 10_000.0), BlockName(next(_ordinals)))
    assert len(times._awaited) <= TURNS_REMEMBERED
