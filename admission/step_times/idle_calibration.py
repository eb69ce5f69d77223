"""Idle calibration: the calibration steps of an idle engine, their times, and the errors of their predictions."""

from collections import deque
from collections.abc import Sequence

from admission.step_times.step_time import StepTimeModel, StepWork, prefill_pairs
from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig

MAX_SHARE_OF_IDLE_TIME = 0.005  # that calibration may take of an idle engine
MIN_INTERVAL_S = 5.0  # between two steps
MAX_STEP_S = 0.02  # predicted: an arriving request may have to wait for the step
MIN_ERRORS = 8  # before their median is reported
ERRORS_REMEMBERED = 32  # of the newest steps


def work_of_shape(step: CalibrationStep) -> StepWork:
    return StepWork(
        step.num_prefills * step.length,
        step.num_decodes,
        step.num_decodes * step.context,
        step.num_prefills * step.start,
        step.num_prefills * prefill_pairs(step.start, step.length),
    )


class IdleCalibration:
    """Cycles through all shapes short enough not to delay an arrival."""

    def __init__(self, config: EngineConfig, model: StepTimeModel) -> None:
        self._config, self._model = config, model
        self._steps: list[CalibrationStep] = []
        self._next = 0
        self._due = 0.0  # the earliest time of the next step
        self._errors: deque[float] = deque(maxlen=ERRORS_REMEMBERED)
        self.is_running = False
        self.num_steps = 0  # run while the engine was idle

    @property
    def drift(self) -> float:
        """The median relative error of recent idle steps, each predicted before it was learned from; 0 before there are
        enough.
        """
        return sorted(self._errors)[len(self._errors) // 2] if len(self._errors) >= MIN_ERRORS else 0.0

    def next_step(self, now: float) -> CalibrationStep | None:
        """Return the step to run now, if a short enough one is due."""
        if self.is_running or now < self._due:
            return None
        if not self._steps:
            self._steps = [step for series in calibration_series(self._config) for step in series]
        for _ in range(len(self._steps)):
            step = self._steps[self._next]
            self._next = (self._next + 1) % len(self._steps)
            if self._model.fitted.seconds(work_of_shape(step)) <= MAX_STEP_S:
                self.is_running = True
                return step
        self._due = now + MIN_INTERVAL_S
        return None

    def record_times(self, measured: Sequence[tuple[CalibrationStep, float]], now: float) -> None:
        """Record the time of the step that ran; empty if it was lost, and several before the first request."""
        if not self.is_running:
            return
        self.is_running = False
        took = 0.0
        for step, seconds in measured:
            if seconds > 0:
                self._errors.append(abs(self._model.fitted.seconds(work_of_shape(step)) / seconds - 1))
                self.num_steps += 1
                took += seconds
        self._due = now + max(MIN_INTERVAL_S, took / MAX_SHARE_OF_IDLE_TIME)
