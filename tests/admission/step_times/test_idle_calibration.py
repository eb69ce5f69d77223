from admission.core import PRIOR_STEP_TIME, CoreConfig, make_core
from admission.step_times.idle_calibration import (
    MAX_SHARE_OF_IDLE_TIME,
    MAX_STEP_S,
    MIN_INTERVAL_S,
    IdleCalibration,
    work_of_shape,
)
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.calibration_steps import CalibrationStep
from backend.config import EngineConfig
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=64, max_model_len=512)


def ran(calibration: IdleCalibration, seconds: float, now: float) -> CalibrationStep | None:
    step = calibration.next_step(now)
    if step is not None:
        calibration.record_times([(step, seconds)], now)
    return step


def test_every_shape_that_is_short_enough_has_its_turn() -> None:
    calibration = IdleCalibration(ENGINE, StepTimeModel(PRIOR_STEP_TIME))
    steps = {ran(calibration, 0.001, 100.0 * n) for n in range(200)}
    assert len(steps) > 20
    assert all(step and PRIOR_STEP_TIME.seconds(work_of_shape(step)) <= MAX_STEP_S for step in steps)


def test_a_device_that_takes_long_for_anything_is_left_alone() -> None:
    slow = StepTime((0.5, 1e-3, 1e-3, 0.0, 0.0, 0.0, 0.0))
    calibration = IdleCalibration(ENGINE, StepTimeModel(slow))
    assert [ran(calibration, 0.5, 10.0 * n) for n in range(10)] == [None] * 10


def test_steps_of_any_duration_take_little_of_the_time() -> None:
    calibration = IdleCalibration(ENGINE, StepTimeModel(PRIOR_STEP_TIME))
    now = took = 0.0
    while now < 3600:
        if ran(calibration, 0.3, now) is not None:
            took += 0.3
        now += 1.0
    assert 0 < took <= 1.1 * MAX_SHARE_OF_IDLE_TIME * 3600
    assert MIN_INTERVAL_S >= 1


def test_drift_is_how_far_predictions_were_off_before_they_were_mended() -> None:
    calibration = IdleCalibration(ENGINE, StepTimeModel(PRIOR_STEP_TIME))
    assert calibration.drift == 0.0
    for n in range(9):
        step = calibration.next_step(100.0 * n)
        assert step is not None
        calibration.record_times([(step, 2 * PRIOR_STEP_TIME.seconds(work_of_shape(step)))], 100.0 * n)
    assert abs(calibration.drift - 0.5) < 1e-9


def test_nothing_is_planned_beside_a_calibration_step_and_none_runs_beside_work() -> None:
    core = make_core(CoreConfig(), ENGINE)
    step = core.calibrate(0.0)
    assert step is not None and core.calibrate(10.0) is None, "one at a time"
    core.arrive(make_sequence("waits", "a", 8, 4), 10.0)
    assert core.schedule(10.0) is None
    core.calibrated([(step, 0.001)], 10.1)
    assert core.schedule(10.1) is not None
    assert core.calibrate(100.0) is None, "somebody runs"


def test_a_step_that_was_lost_teaches_nothing_and_keeps_nobody_waiting() -> None:
    core = make_core(CoreConfig(), ENGINE)
    before = core.step_time.fitted
    assert core.calibrate(0.0) is not None
    core.calibrated([], 0.1)
    assert core.step_time.fitted == before and core.calibrate(10.0) is not None


def test_a_core_that_is_not_to_calibrate_never_does() -> None:
    assert make_core(CoreConfig(calibration=False), ENGINE).calibrate(0.0) is None
