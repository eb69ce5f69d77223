"""The core's events, as observers receive them: the event log, telemetry, a monitor of fairness."""

from collections.abc import Collection, Mapping

from admission.outcome import AdmissionRefused
from admission.promise import Promise
from admission.request import JudgedRequest
from admission.scheduling_policy import SchedulingPolicy
from backend.calibration_steps import CalibrationStep, CalibrationTimes
from backend.paged_kv.block_names import BlockName
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence


class CoreObserver:
    """An observer is told of every event once the core has dealt with it, in order, and never changes the core.

    Each method does nothing until a subclass overrides it. `now` is the time of the event in seconds of the engine's
    clock. An observer's exception never reaches the core: see `make_core`.
    """

    def requested(self, asked: JudgedRequest, now: float) -> None:
        """A tenant's limits were asked for the prompts of one HTTP request, which arrive next or were refused."""

    def arrived(self, sequence: Sequence, answer: Promise | AdmissionRefused, now: float) -> None:
        """The sequence waits, or was refused; the core keeps nothing of a refused sequence."""

    def finished(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """The sequence was ended from outside of the core: by the gateway, a client or an admin."""

    def gave_up(self, sequence: Sequence, now: float) -> None:
        """The core has ended the sequence itself: it expired, or lost its memory to others."""

    def allowed(self, tenant: str, blocks: int | None, now: float) -> None:
        """The tenant may hold this many blocks from now on; None: any number."""

    def cache_limited(self, tenant: str, floor: int, ceiling: int | None, now: float) -> None:
        """From `floor` (not evictable) to `ceiling` idle cached blocks of the tenant are kept."""

    def prefixes_pinned(self, tenant: str, names: Collection[BlockName], now: float) -> None:
        """The tenant's cached blocks of these names are pinned, and no others of it."""

    def extended(self, sequence: Sequence, tokens: int, now: float) -> None:
        """The sequence may generate this many tokens more than so far."""

    def charged(self, tenant: str, seconds: float, now: float, is_spare: bool) -> None:
        """The tenant was charged `seconds` of a processor for its requests' work beside the engine; `is_spare`: of
        requests of the spare class.
        """

    def debts_changed(self, served: Mapping[str, float], replicas: int, now: float) -> None:
        """The other replicas have served tenants this much more, in the unit of account; `replicas` counts all."""

    def policy_changed(self, policy: SchedulingPolicy, now: float) -> None:
        """These weights, classes and bounds hold from now on."""

    def calibrating(self, step: CalibrationStep, now: float) -> None:
        """The device is idle, and is to run this step to measure its time."""

    def calibrated(self, measured: CalibrationTimes, now: float, model: int) -> None:
        """Calibration steps of a model took these times, in seconds."""

    def scheduled(self, step: ScheduledStep | None, now: float) -> None:
        """A step was planned, or none could be. No event while the most steps are in flight."""

    def updated(self, step: ScheduledStep, output: StepOutput, now: float) -> None:
        """The oldest step in flight is done and accounted for."""

    def rolled_back(self, step: ScheduledStep, now: float) -> None:
        """The device had no memory for `step`: it and those behind it are as if never planned."""
