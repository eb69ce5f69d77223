import pytest

from admission.calibration import CalibratedEstimate, EstimateCalibration
from admission.conformal import COLD_MARGIN_SHARE, MIN_RESIDUALS, RESIDUALS_REMEMBERED
from admission.forecast import Forecast
from admission.step_times.step_time import Pipeline
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence


def estimate(first: float = 1.0, last: float = 10.0) -> Forecast:
    return Forecast(first, last, 0.0, 0.0, 0.0, 0.5, [])


def of_class(level: int) -> Sequence:
    return make_sequence(priority_class=level)


def track(calibration: EstimateCalibration, waits: Sequence, guess: Forecast) -> CalibratedEstimate:
    calibrated = calibration.calibrate(waits, guess, 0.0)
    calibration.track(waits, calibrated)
    return calibrated


def answered(calibration: EstimateCalibration, guess: Forecast, first: float, last: float, level: int = 0) -> None:
    waits = of_class(level)
    track(calibration, waits, guess)
    calibration.first_token(waits, first)
    calibration.last_token(waits, last)


def learned(first: float, last: float, level: int = 0) -> EstimateCalibration:
    """Enough requests were answered after these seconds, of which 1 and 10 were expected."""
    calibration = EstimateCalibration(0.4)
    for _ in range(MIN_RESIDUALS):
        answered(calibration, estimate(), first, last, level)
    return calibration


def test_a_class_of_which_nothing_is_known_is_told_the_estimate_with_a_margin() -> None:
    calibrated = EstimateCalibration(0.4).calibrate(make_sequence(), estimate(), 0.0)
    assert (calibrated.first_token.reported, calibrated.last_token.reported) == (
        1 + COLD_MARGIN_SHARE,
        10 * (1 + COLD_MARGIN_SHARE),
    )


def test_errors_are_in_proportion_to_what_was_estimated() -> None:
    calibrated = learned(first=1.5, last=5.0).calibrate(make_sequence(), estimate(3.0, 40.0), 0.0)
    assert calibrated.first_token.likely == calibrated.first_token.reported == pytest.approx(4.5)
    assert calibrated.last_token.likely == calibrated.last_token.reported == pytest.approx(20.0)


def test_a_last_token_is_never_told_to_come_before_the_first() -> None:
    calibration = learned(first=1.0, last=1.0)
    assert calibration.calibrate(make_sequence(), estimate(2.0, 4.0), 0.0).last_token.reported == pytest.approx(2.0)


def test_each_class_learns_from_its_own() -> None:
    calibration = learned(first=2.0, last=20.0, level=1)
    assert calibration.calibrate(of_class(1), estimate(), 0.0).last_token.reported == pytest.approx(20.0)
    assert calibration.calibrate(make_sequence(), estimate(), 0.0).last_token.reported == 10 * (1 + COLD_MARGIN_SHARE)


def test_the_decisive_bound_is_below_the_reported_one() -> None:
    calibration = EstimateCalibration(0.4)
    for n in range(100):
        answered(calibration, estimate(), first=1 + n / 100, last=10 + n / 10)
    calibrated = calibration.calibrate(make_sequence(), estimate(), 0.0)
    assert (
        calibrated.first_token.likely < calibrated.first_token.reported
        and calibrated.last_token.likely < calibrated.last_token.reported
    )


def test_a_request_that_expires_before_its_first_token_broke_the_first_promise() -> None:
    calibration = EstimateCalibration(0.4)
    waits = make_sequence()
    track(calibration, waits, estimate())
    calibration.expired(waits, 0.5)
    assert calibration.coverage == 0 and calibration.completion_coverage == 0
    assert calibration._last[0].kept == calibration._last[0].broken == 0, (
        "nobody knows when its last token would have come"
    )


def test_a_request_that_expires_in_its_answer_kept_the_first_and_counts_as_late() -> None:
    calibration = EstimateCalibration(0.4)
    for n in range(MIN_RESIDUALS):
        answered(calibration, estimate(), first=1.0, last=float(n))
    waits = make_sequence()
    track(calibration, waits, estimate(1.0, 10.0))
    calibration.first_token(waits, 1.0)
    waits.output = [0]
    calibration.expired(waits, 12.0)
    calibration.last_token(waits, 50.0)
    assert calibration.coverage == 1.0
    residuals = calibration._last[0]._reported._all.ascending
    assert len(residuals) == MIN_RESIDUALS + 1
    assert sum(each == pytest.approx(16 / 10 - 1) for each in residuals) == 2, "the median of 13 to 19 s"


def test_a_cancelled_one_says_nothing() -> None:
    calibration = EstimateCalibration(0.4)
    waits = make_sequence()
    track(calibration, waits, estimate())
    calibration.forget(waits, 0.5)
    calibration.first_token(waits, 9.0)
    calibration.last_token(waits, 9.0)
    assert calibration._first[0, False, False].kept + calibration._first[0, False, False].broken == 0


def test_a_promise_that_has_passed_is_a_miss_before_its_token_comes() -> None:
    """The next are told more, as soon as those who were told the same have waited longer."""
    calibration = EstimateCalibration(0.4)
    for n in range(100):
        answered(calibration, estimate(), first=1 + n / 100, last=10.0)
    told = calibration.calibrate(make_sequence(), estimate(), 0.0).first_token.reported
    broken = calibration._first[0, False, False].broken
    waiting = [make_sequence(str(n)) for n in range(10)]
    for waits in waiting:
        track(calibration, waits, estimate())
    assert calibration.calibrate(make_sequence(), estimate(), told - 0.01).first_token.reported == told
    known = calibration.calibrate(make_sequence(), estimate(), told + 0.01).first_token.reported
    assert known > told and calibration._first[0, False, False].broken == broken + 10
    for waits in waiting:
        calibration.first_token(waits, told + 0.1)
    assert calibration._first[0, False, False].broken == broken + 10, "each counts once"


def test_a_client_that_leaves_after_its_promise_has_passed_had_it_broken() -> None:
    calibration = EstimateCalibration(0.4)
    waits = make_sequence()
    track(calibration, waits, estimate())
    calibration.forget(waits, 1.3)
    assert calibration._first[0, False, False].broken == 1 and calibration._last[0].broken == 0


def test_promises_that_expire_do_not_make_the_next_ones_longer_and_longer() -> None:
    calibration, told = EstimateCalibration(0.4), []
    for _ in range(500):
        waits = make_sequence()
        told.append(track(calibration, waits, estimate()).first_token.reported)
        calibration.expired(waits, 2.0)
    assert max(told) <= 2.5, "it is known that they came after 2 s and their prefill, and no more"


def test_short_and_long_prompts_and_tenants_are_told_by_their_own() -> None:
    calibration = EstimateCalibration(0.4)
    lasted = {("a", 10): 1.0, ("a", 1000): 2.0, ("b", 1000): 3.0}
    for _ in range(RESIDUALS_REMEMBERED // 6):
        for (tenant, prompt), seconds in lasted.items():
            waits = make_sequence(tenant=tenant, prompt=prompt)
            calibration.track(waits, calibration.calibrate(waits, estimate(), 0.0))
            calibration.first_token(waits, seconds)
            calibration.last_token(waits, 10 * seconds)

    def told(tenant: str, prompt: int) -> float:
        waits = make_sequence(tenant=tenant, prompt=prompt)
        return calibration.calibrate(waits, estimate(), 0.0).first_token.reported

    assert {each: told(*each) for each in lasted} == pytest.approx(lasted)
    assert told("new", 10) == pytest.approx(1.0), "as others' prompts of this length"


def test_an_admission_is_decided_by_what_could_be_known() -> None:
    pipeline = Pipeline()
    calibration = EstimateCalibration(0.9, pipeline)
    for n in range(60):
        one = make_sequence(str(n))
        calibration.track(one, calibration.calibrate(one, estimate(1.0, 10.0), 0.0))
        calibration.overtaken([one], 0.5)
        pipeline.planned(0.1, 0.0)
        pipeline.completed(2.2)
        calibration.first_token(one, 3.5)
    assert calibration.likely((0, False, False)).at(1.0) == pytest.approx(1.0)
    assert calibration.calibrate(make_sequence(), estimate(1.0, 10.0), 4.0).first_token.reported > 3.0


def test_errors_of_requests_that_wait_for_their_share_are_not_held_against_deadlines() -> None:
    """A backlog of one tenant's requests without deadlines had others' deadlines refused while nothing waited."""
    calibration = learned(first=10.0, last=20.0)
    pressing = make_sequence(first_token_by=2.0)
    assert calibration.calibrate(make_sequence(), estimate(), 0.0).first_token.likely == pytest.approx(10.0)
    assert calibration.calibrate(pressing, estimate(), 0.0).first_token.likely == 1 + COLD_MARGIN_SHARE


def test_errors_of_tenants_in_debt_are_not_held_against_far_deadlines_of_others() -> None:
    """A tenant in debt waits for longer than its forecast: of other tenants' work that comes later, and goes first."""
    calibration = EstimateCalibration(0.4, owes=lambda sequence: sequence.tenant == "debtor")
    for n in range(MIN_RESIDUALS):
        waits = make_sequence(str(n), "debtor", first_token_by=30.0)
        track(calibration, waits, estimate())
        calibration.first_token(waits, 20.0)
    likely = {
        tenant: calibration.calibrate(
            make_sequence("x", tenant, first_token_by=30.0), estimate(), 0.0
        ).first_token.likely
        for tenant in ("debtor", "other")
    }
    assert likely == pytest.approx({"debtor": 20.0, "other": 1 + COLD_MARGIN_SHARE})


def test_errors_of_estimates_by_declared_length_do_not_count_for_estimates_by_answers() -> None:
    calibration = learned(first=1.0, last=10.0)
    for _ in range(200):
        waits = make_sequence()
        calibration.track(waits, calibration.calibrate(waits, estimate(1.0, 50.0), 0.0), knows_length=False)
        calibration.last_token(waits, 10.0)
    assert calibration.calibrate(make_sequence(), estimate(), 0.0).last_token.reported == pytest.approx(10.0)
    assert calibration.completion_coverage == 1.0, "whether it held counts all the same"


def test_reported_bounds_are_wider_for_later_deadlines_which_are_overtaken() -> None:
    calibration = EstimateCalibration(0.9)

    def waiting(deadline: float) -> Sequence:
        return make_sequence(first_token_by=deadline)

    for _ in range(RESIDUALS_REMEMBERED // 6):
        for deadline, seconds in ((0.7, 1.0), (8.0, 4.0)):
            waits = waiting(deadline)
            calibration.track(waits, calibration.calibrate(waits, estimate(), 0.0))
            calibration.first_token(waits, seconds)
    told = [calibration.calibrate(waiting(deadline), estimate(), 0.0).first_token.reported for deadline in (0.6, 7.0)]
    assert told == pytest.approx([1.0, 4.0])
