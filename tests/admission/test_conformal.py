from random import Random

import pytest

from admission.conformal import (
    COLD_MARGIN_SHARE,
    MAX_RESIDUAL_GROUPS,
    MIN_RESIDUALS,
    RESIDUALS_REMEMBERED,
    ConformalBound,
)

GROUP_WINDOW, GROUP_ENOUGH = RESIDUALS_REMEMBERED // 3, RESIDUALS_REMEMBERED // 6
LONG = 64.0  # errors of all estimates here are ratios to it


def bound(conformal: ConformalBound, estimate: float, groups: tuple[object, ...] = ()) -> float:
    return conformal.line(groups).at(estimate)


def coverage(noise: list[float], confidence: float = 0.9, skip: int = 100) -> float:
    """Share of the bounds that held, after some to learn from."""
    conformal, held = ConformalBound(confidence, LONG), []
    for residual in noise:
        held.append(10.0 + residual <= bound(conformal, 10.0))
        conformal.observe(10.0, 10.0 + residual)
        conformal.adapt(not held[-1])
    return sum(held[skip:]) / len(held[skip:])


@pytest.mark.parametrize("confidence", [0.5, 0.9])
def test_bounds_hold_as_often_as_they_say(confidence: float) -> None:
    random = Random(1)
    assert coverage([random.gauss(0.5, 1) for _ in range(4000)], confidence) == pytest.approx(confidence, abs=0.02)


def test_bounds_follow_a_drift() -> None:
    random = Random(2)
    drifting = [random.expovariate(1) * (1 + n / 1000) for n in range(6000)]
    assert coverage(drifting) == pytest.approx(0.9, abs=0.02)


def test_before_enough_is_known_the_margin_is_a_share_of_the_estimate() -> None:
    conformal = ConformalBound(0.9, LONG)
    for _ in range(MIN_RESIDUALS - 1):
        conformal.observe(1.0, 1.0)
    assert bound(conformal, 2.0) == 2.0 * (1 + COLD_MARGIN_SHARE)
    conformal.observe(1.0, 1.0)
    assert bound(conformal, 2.0) == 2.0


@pytest.mark.parametrize("relative_from", [LONG, 1.5])
def test_a_bound_is_never_negative_and_never_falls_as_the_estimate_rises(relative_from: float) -> None:
    conformal = ConformalBound(0.9, relative_from)
    for n in range(50):
        conformal.observe(3.0, n / 100)
    bounds = [bound(conformal, n / 10) for n in range(60)]
    assert min(bounds) == 0.0 and bounds == sorted(bounds)


def test_a_residual_that_was_cut_short_counts_as_those_that_went_further() -> None:
    conformal = ConformalBound(0.9, LONG)
    for n in range(10):
        conformal.observe(1.0, 1.0 + n)
    assert conformal.beyond(2.0, least=5.5) == 9.0  # the median of 4 to 9 beyond the estimate, the higher of two
    assert conformal.beyond(2.0, least=11.0) == 11.0, "nothing went further"


def test_residuals_are_differences_or_from_one_estimate_on_multiples_of_it() -> None:
    differences, multiples = ConformalBound(0.9, LONG), ConformalBound(0.9, 2.0)
    for conformal in (differences, multiples):
        for _ in range(MIN_RESIDUALS):
            conformal.observe(4.0, 5.0)
    assert [bound(differences, estimate) for estimate in (0.0, 2.0, 8.0)] == [1.0, 3.0, 9.0]
    assert [bound(multiples, estimate) for estimate in (0.0, 2.0, 8.0)] == [0.5, 2.5, 10.0]
    assert multiples.beyond(8.0, least=9.0) == 10.0


def test_a_confidence_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 1"):
        ConformalBound(1, LONG)


def test_a_group_is_told_by_its_own_once_enough_is_known_of_it() -> None:
    conformal = ConformalBound(0.9, LONG)
    for n in range(GROUP_ENOUGH):
        assert bound(conformal, 1.0, ("slow",)) == bound(conformal, 1.0, ("unknown",)), f"{n} of its own are too few"
        conformal.observe(1.0, 5.0, ("slow",))
        conformal.observe(1.0, 1.0, ("fast",))
    assert bound(conformal, 1.0, ("slow",)) == 5.0 and bound(conformal, 1.0, ("fast",)) == 1.0
    assert bound(conformal, 1.0, (("slow", "unknown"), "fast")) == 1.0, "the finest of which enough is known"


def test_a_group_forgets_what_is_long_past() -> None:
    conformal = ConformalBound(0.9, LONG)
    for measured in (5.0, 2.0):
        for _ in range(GROUP_WINDOW):
            conformal.observe(1.0, measured, ("a",))
    assert bound(conformal, 1.0, ("a",)) == 2.0 and bound(conformal, 1.0) == 5.0


def test_the_groups_kept_are_bounded_and_those_that_come_stay() -> None:
    conformal = ConformalBound(0.9, LONG)
    for n in range(MAX_RESIDUAL_GROUPS + 50):
        conformal.observe(1.0, 9.0, (f"once-{n}",))
        conformal.observe(1.0, 1.0, ("comes",))
    assert len(conformal._groups) == MAX_RESIDUAL_GROUPS and bound(conformal, 1.0, ("comes",)) == 1.0


def test_misses_that_go_on_take_bounds_beyond_all_that_was_measured_where_nothing_depends_on_it() -> None:
    reported, decisive = ConformalBound(0.9, LONG, 0.03, extrapolates=True), ConformalBound(0.9, LONG, 0.03)
    for conformal in (reported, decisive):
        for n in range(100):
            conformal.observe(1.0, 1.0 + n / 99)
        for _ in range(1000):
            conformal.adapt(True)
    assert bound(decisive, 1.0) == 2.0, "the largest residual"
    assert bound(reported, 1.0) == pytest.approx(2.5, abs=0.01), "as far beyond it as that is from the median"
    for _ in range(1000):
        reported.adapt(False)
    assert bound(reported, 1.0) < 1.5
