"""The events of the core, as it tells them to its observers: the event log, telemetry, a monitor of fairness."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Sequenced

from admission.outcome import AdmissionRefused
from admission.request import Asked
from admission.scheduling_policy import SchedulingPolicy
from backend.calibration_steps import CalibrationStep
from backend.paged_kv.block_names import BlockName
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence


class CoreObserver:
    """An observer is told of every event once the core has dealt with it, in order, and changes nothing of the core.

    Each method does nothing until a subclass overrides it. `now` is the time of the event in seconds of the engine's
    clock. What an observer raises never reaches the core: see `Controller.observer_failed`.
    """

    def requested(self, asked: Asked, now: float) -> None:
        """A tenant's limits were asked for the prompts of one HTTP request; they are yet to arrive, or were refused."""

    def arrived(self, sequence: Sequence, refusal: AdmissionRefused | None, now: float) -> None:
        """The sequence waits, unless there is a refusal; then the core keeps nothing of it."""

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """The sequence was ended from outside of the core: by the gateway, a client or an admin."""

    def gave_up(self, sequence: Sequence, now: float) -> None:
        """The core has ended the sequence itself: its time was over, or its memory went to others."""

    def allowed(self, tenant: str, blocks: int | None, now: float) -> None:
        """The tenant may hold this many blocks from now on; None: any number."""

    def cache_limited(self, tenant: str, floor: int, ceiling: int | None, now: float) -> None:
        """Of the tenant's idle cached blocks, so many are kept whatever others need, and at most `ceiling`."""

    def prefixes_pinned(self, tenant: str, names: Collection[BlockName], now: float) -> None:
        """Of the tenant's cached blocks, those of these names stay from now on, and no others are pinned for it."""

    def extended(self, sequence: Sequence, tokens: int, now: float) -> None:
        """The sequence may generate this many tokens more than so far."""

    def charged(self, tenant: str, seconds: float, now: float) -> None:
        """The tenant was charged for so many seconds of a processor that its requests took beside the engine."""

    def debts_changed(self, served: Mapping[str, float], replicas: int, now: float) -> None:
        """The others of so many replicas have served tenants this much more, in the unit of account."""

    def policy_changed(self, policy: SchedulingPolicy, now: float) -> None:
        """These weights, classes and bounds hold from now on."""

    def calibrating(self, step: CalibrationStep, now: float) -> None:
        """The device is idle, and is to run this step for what it takes."""

    def calibrated(self, measured: Sequenced[tuple[CalibrationStep, float]], now: float) -> None:
        """Calibration steps took these times, in seconds."""

    def scheduled(self, step: ScheduledStep | None, now: float) -> None:
        """A step was planned, or none could be. Nothing is told where as many steps are in flight as may be."""

    def updated(self, step: ScheduledStep, output: StepOutput, now: float) -> None:
        """The oldest step in flight is done and accounted for."""

    def rolled_back(self, step: ScheduledStep, now: float) -> None:
        """The device had no memory for `step`: it and those behind it are as if never planned."""
