"""A core on a virtual clock, over a device that only takes time."""

from collections import deque
from collections.abc import Callable

from admission.core import CoreConfig, make_core
from admission.step_time import StepTimeModel
from backend.config import EngineConfig
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

Seconds = Callable[[ScheduledStep], float]


class ClockedCore:
    """Its steps take as many seconds as `seconds` says, from the completion of the one before."""

    def __init__(
        self, config: CoreConfig, engine: EngineConfig, seconds: Seconds, model: StepTimeModel | None = None
    ) -> None:
        self.core = make_core(config, engine, model)
        self.scheduler = self.core.scheduler
        self.now = 0.0
        self.launched: deque[tuple[ScheduledStep, float]] = deque()
        self._seconds = seconds

    def add(self, sequence: Sequence) -> Sequence:
        """Let a sequence arrive now. Raises `AdmissionRefused`."""
        self.core.arrive(sequence, self.now)
        return sequence

    def launch(self) -> None:
        """Plan as many steps as may be in flight."""
        while self.core.schedule(self.now) is not None:
            step = self.scheduler.in_flight[-1]
            self.launched.append((step, self._seconds(step)))

    def step(self) -> float:
        """Plan, and complete the oldest step; returns the seconds that it took."""
        self.launch()
        step, elapsed = self.launched.popleft()
        self.now += elapsed
        self.core.update_from_output(StepOutput(step.batch.step, [0] * len(step.sampled), elapsed), self.now)
        return elapsed

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
