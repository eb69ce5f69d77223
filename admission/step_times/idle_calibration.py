"""Decides which calibration step an idle engine runs, and when, and how far predictions were off those that ran."""

from collections import deque
from collections.abc import Sequence

from admission.step_times.step_time import StepTimeModel, StepWork, prefill_pairs
from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig

SHARE = 0.005  # of the time, that calibration takes of an idle engine
INTERVAL = 5.0  # seconds between two steps, at least
LONGEST = 0.02  # seconds that a step may be predicted to take: a request that comes may have to wait for it
ENOUGH = 8  # steps, until their errors say anything of all prices
RECENT = 32  # steps whose errors are remembered


def work_of_shape(step: CalibrationStep) -> StepWork:
    """Returns the work of a calibration step."""
    return StepWork(
        step.num_prefills * step.length,
        step.num_decodes,
        step.num_decodes * step.context,
        step.num_prefills * step.start,
        step.num_prefills * prefill_pairs(step.start, step.length),
    )


class IdleCalibration:
    """Takes turns through all shapes that are short enough to be in nobody's way."""

    def __init__(self, config: EngineConfig, model: StepTimeModel) -> None:
        self._config, self._model = config, model
        self._steps: list[CalibrationStep] = []
        self._next = 0
        self._due = 0.0  # when the next may run
        self._errors: deque[float] = deque(maxlen=RECENT)
        self.is_running = False
        self.num_steps = 0  # that ran while the engine was idle

    @property
    def drift(self) -> float:
        """The median of how far recent idle steps were off their predictions, each before it was learned from, as a
        share of what they took; 0 before there were enough.
        """
        return sorted(self._errors)[len(self._errors) // 2] if len(self._errors) >= ENOUGH else 0.0

    def begin(self, now: float) -> CalibrationStep | None:
        """Returns the step that is to run now, if one is due and short enough."""
        if self.is_running or now < self._due:
            return None
        if not self._steps:
            self._steps = [step for series in calibration_series(self._config) for step in series]
        for _ in range(len(self._steps)):
            step = self._steps[self._next]
            self._next = (self._next + 1) % len(self._steps)
            if self._model.fitted.seconds(work_of_shape(step)) <= LONGEST:
                self.is_running = True
                return step
        self._due = now + INTERVAL
        return None

    def end(self, measured: Sequence[tuple[CalibrationStep, float]], now: float) -> None:
        """Note what the step that ran took; nothing if it was lost, and several if they ran before the first."""
        if not self.is_running:
            return
        self.is_running = False
        took = 0.0
        for step, seconds in measured:
            if seconds > 0:
                self._errors.append(abs(self._model.fitted.seconds(work_of_shape(step)) / seconds - 1))
                self.num_steps += 1
                took += seconds
        self._due = now + max(INTERVAL, took / SHARE)
