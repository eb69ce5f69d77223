from random import Random

import pytest

from admission.calibration import COLD_MARGIN, ENOUGH, CalibratedEstimate, ConformalBound, EstimateCalibration
from admission.estimate import Estimate
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence


def coverage(noise: list[float], confidence: float = 0.9, skip: int = 100) -> float:
    """Share of the bounds that held, after some to learn from."""
    conformal, held = ConformalBound(confidence), []
    for residual in noise:
        bound = conformal.bound(10.0)
        held.append(10.0 + residual <= bound)
        conformal.observe(10.0, 10.0 + residual, not held[-1])
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
    conformal = ConformalBound(0.9)
    for _ in range(ENOUGH - 1):
        conformal.observe(1.0, 1.0, missed=False)
    assert conformal.bound(2.0) == 2.0 * (1 + COLD_MARGIN)
    conformal.observe(1.0, 1.0, missed=False)
    assert conformal.bound(2.0) == 2.0


@pytest.mark.parametrize("relative_from", [None, 1.5])
def test_a_bound_is_never_negative_and_never_falls_as_the_estimate_rises(relative_from: float | None) -> None:
    conformal = ConformalBound(0.9, relative_from=relative_from)
    for n in range(50):
        conformal.observe(3.0, n / 100, missed=False)
    bounds = [conformal.bound(n / 10) for n in range(60)]
    assert min(bounds) == 0.0 and bounds == sorted(bounds)


def test_a_residual_that_was_cut_short_counts_as_those_that_went_further() -> None:
    conformal = ConformalBound(0.9)
    for n in range(10):
        conformal.observe(1.0, 1.0 + n, missed=False)
    assert conformal.beyond(2.0, least=5.5) == 9.0  # the median of 4 to 9 beyond the estimate, the higher of two
    assert conformal.beyond(2.0, least=11.0) == 11.0, "nothing went further"


def test_residuals_are_differences_or_multiples_of_the_estimate_from_one_on() -> None:
    differences, multiples = ConformalBound(0.9), ConformalBound(0.9, relative_from=2.0)
    for conformal in (differences, multiples):
        for _ in range(ENOUGH):
            conformal.observe(4.0, 5.0, missed=False)
    assert [differences.bound(estimate) for estimate in (0.0, 2.0, 8.0)] == [1.0, 3.0, 9.0]
    assert [multiples.bound(estimate) for estimate in (0.0, 2.0, 8.0)] == [0.5, 2.5, 10.0]
    assert multiples.beyond(8.0, least=9.0) == 10.0


def test_a_confidence_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 1"):
        ConformalBound(1)


def estimate(first: float = 1.0, last: float = 10.0) -> Estimate:
    return Estimate(first, last, 0.0, lambda: 0.0, 0.5, 0.5, 0.0)


def track(calibration: EstimateCalibration, waits: Sequence, guess: Estimate, level: int = 0) -> CalibratedEstimate:
    waits.priority_class = level
    calibrated = calibration.calibrate(level, guess, 0.0)
    calibration.track(waits, calibrated)
    return calibrated


def answered(calibration: EstimateCalibration, guess: Estimate, first: float, last: float, level: int = 0) -> None:
    waits = make_sequence()
    track(calibration, waits, guess, level)
    calibration.first_token(waits, first)
    calibration.last_token(waits, last)


def learned(first: float, last: float, level: int = 0) -> EstimateCalibration:
    """Enough was answered after so many seconds, of which 1 and 10 were expected."""
    calibration = EstimateCalibration(0.4)
    for _ in range(ENOUGH):
        answered(calibration, estimate(), first, last, level)
    return calibration


def test_a_class_of_which_nothing_is_known_is_told_the_estimate_with_a_margin() -> None:
    calibrated = EstimateCalibration(0.4).calibrate(0, estimate(), 0.0)
    assert (calibrated.first_token.reported, calibrated.last_token.reported) == (
        1 + COLD_MARGIN,
        10 * (1 + COLD_MARGIN),
    )


def test_clients_are_told_in_proportion_and_a_first_token_is_decided_by_seconds() -> None:
    calibrated = learned(first=1.5, last=5.0).calibrate(0, estimate(3.0, 40.0), 0.0)
    assert (calibrated.first_token.likely, calibrated.first_token.reported) == (pytest.approx(3.5), pytest.approx(4.5))
    assert calibrated.last_token.likely == calibrated.last_token.reported == pytest.approx(20.0)


def test_a_last_token_is_never_told_to_come_before_the_first() -> None:
    calibration = learned(first=1.0, last=1.0)
    assert calibration.calibrate(0, estimate(2.0, 4.0), 0.0).last_token.reported == pytest.approx(2.0)


def test_each_class_learns_from_its_own() -> None:
    calibration = learned(first=2.0, last=20.0, level=1)
    assert calibration.calibrate(1, estimate(), 0.0).last_token.reported == pytest.approx(20.0)
    assert calibration.calibrate(0, estimate(), 0.0).last_token.reported == 10 * (1 + COLD_MARGIN)


def test_what_is_likely_comes_sooner_than_what_is_told() -> None:
    calibration = EstimateCalibration(0.4)
    for n in range(100):
        answered(calibration, estimate(), first=1 + n / 100, last=10 + n / 10)
    calibrated = calibration.calibrate(0, estimate(), 0.0)
    assert (
        calibrated.first_token.likely < calibrated.first_token.reported
        and calibrated.last_token.likely < calibrated.last_token.reported
    )


def test_whoever_expires_before_its_first_token_broke_the_first_promise() -> None:
    calibration = EstimateCalibration(0.4)
    waits = make_sequence()
    track(calibration, waits, estimate())
    calibration.expired(waits, 0.5)
    assert calibration.coverage == 0 and calibration.completion_coverage == 0
    assert calibration._last[0].kept == calibration._last[0].broken == 0, (
        "nobody knows when its last token would have come"
    )


def test_whoever_expires_in_its_answer_kept_the_first_and_counts_as_one_of_those_that_took_longer() -> None:
    calibration = EstimateCalibration(0.4)
    for n in range(ENOUGH):
        answered(calibration, estimate(), first=1.0, last=float(n))
    waits = make_sequence()
    track(calibration, waits, estimate(1.0, 10.0))
    calibration.first_token(waits, 1.0)
    waits.output = [0]
    calibration.expired(waits, 12.0)
    calibration.last_token(waits, 50.0)
    assert calibration.coverage == 1.0
    residuals = calibration._last[0]._reported._sorted
    assert len(residuals) == ENOUGH + 1
    assert sum(each == pytest.approx(16 / 10 - 1) for each in residuals) == 2, "the median of 13 to 19 s"


def test_a_cancelled_one_says_nothing() -> None:
    calibration = EstimateCalibration(0.4)
    waits = make_sequence()
    track(calibration, waits, estimate())
    calibration.forget(waits)
    calibration.first_token(waits, 9.0)
    calibration.last_token(waits, 9.0)
    assert calibration._first[0].kept + calibration._first[0].broken == 0
