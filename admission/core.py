"""The configuration of a core, and the making of one: order, unit of account, and memory gate."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from admission.backlog import Backlog, DrainMeter
from admission.controller import Controller
from admission.expiry import DeadlineExpiry, Expiry, NoExpiry
from admission.forecast import Forecaster
from admission.keyed_order import KeyedOrder
from admission.kv.memory import MEMORY_RISK_DEVIATIONS, FuturePeak, Gate
from admission.kv.retention import BetweenTurnsRule, MeasuredRetention
from admission.kv.swap_choice import SwapChoice, SwapRule
from admission.ledger import AdapterTime, EngineTimeTariff, Ledger, Tariffs
from admission.order import DueOrder, WaitingOrder, class_offsets
from admission.output_length import OutputLengths
from admission.overload import AdmissionControl, OverloadConfig
from admission.prefill_sizer import PrefillSizer
from admission.scheduling_policy import QueueBounds
from admission.share import BURST_S, Share
from admission.spare import SPARE_SHARE, SpareLast, SpareSizer
from admission.step_times.step_time import CopyTime, Pipeline, StepTime, StepTimeModel
from admission.tenant_hooks import TenantHooks
from backend.config import EngineConfig
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

PRIOR_STEP_TIME = StepTime((2e-3, 5e-5, 5e-5, 1e-7, 1e-7, 1e-9, 1e-6))
"""The prior before any step is measured: a small model on a slow device, corrected within a few dozen steps."""

_UNITS = ("", "_tokens", "_bytes", "_seconds")  # of bounds, in the order of `QueueBounds`
_BOUNDS = tuple(f"{whose}max_waiting{unit}" for whose in ("", "tenant_") for unit in _UNITS)


class MemoryGate(StrEnum):
    """The rule by which a sequence may join the running ones, if its present tokens fit."""

    FORECAST = "forecast"
    MINIMUM_FREE = "minimum_free"  # while a fixed number of blocks stays free, as vLLM's watermark does
    OPTIMISTIC = "optimistic"  # always: memory relies on preemption


class Overload(StrEnum):
    """The rule of overload control. All but the last bound the queue and its classes; a tenant's own bounds on waiting
    hold under each.
    """

    DEADLINE = "deadline"  # infeasible requests are refused at once, and expired when their deadline has passed
    CONTROLLED_DELAY = "controlled_delay"  # requests are given up after too long a wait: see `labs.controlled_delay`
    BOUNDED = "bounded"
    UNBOUNDED = "unbounded"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Choices of the core. Raises `ValueError` naming the field."""

    order: str = "fair"  # of `ORDERS`
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 for all others
    burst_s: float = BURST_S  # engine seconds that a tenant of weight 1 may save
    seconds_per_class: float = 20.0  # of waiting, worth one class
    memory: MemoryGate = MemoryGate.FORECAST
    min_free_blocks: int = 0
    memory_risk: float = MEMORY_RISK_DEVIATIONS  # of the forecast
    calibration: bool = True  # the engine runs calibration steps, before the first and while idle
    swap: SwapRule = SwapRule.MEASURED
    between_turns: BetweenTurnsRule = BetweenTurnsRule.MEASURED
    prefill_share: float = 1.0  # of the token budget, where no decode has a promised token interval
    spare_share: float = SPARE_SHARE  # by which the lines of batches may lengthen the steps of others
    overload: Overload = Overload.DEADLINE
    confidence: float = 0.95  # that an admitted request meets its deadline
    max_waiting: int | None = 1024  # requests
    max_waiting_tokens: int | None = None
    max_waiting_bytes: int | None = None
    max_waiting_seconds: float | None = None  # predicted, of the engine's time
    tenant_max_waiting: int | None = None
    tenant_max_waiting_tokens: int | None = None
    tenant_max_waiting_bytes: int | None = None
    tenant_max_waiting_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order}")
        for name in ("burst_s", "seconds_per_class", *_BOUNDS):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {self.confidence}")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"weights.{tenant} must be above 0, got {weight}")


class OrderParts(NamedTuple):
    """The parts from which an order is made."""

    config: CoreConfig
    engine: EngineConfig
    share: Share
    lengths: OutputLengths
    tariffs: Tariffs
    backlog: Backlog

    def uncached(self, sequence: Sequence) -> int:
        """Return the uncomputed tokens of a sequence about to wait."""
        return sequence.num_tokens - self.backlog.num_cached_tokens(sequence)

    def cost(self, sequence: Sequence) -> float:
        """Predict the engine seconds of a waiting sequence."""
        output = self.lengths.mean(sequence.tenant, sequence.request.max_tokens, len(sequence.output))
        return self.tariffs.estimate(sequence, output, sequence.num_found_tokens)


def _fair(parts: OrderParts) -> DueOrder:
    return DueOrder(parts.share, class_offsets(parts.config.seconds_per_class), parts.cost, parts.uncached)


ORDERS: dict[str, Callable[[OrderParts], WaitingOrder]] = {
    "fair": _fair,
    "fcfs": lambda parts: KeyedOrder(lambda sequence: sequence.arrival, parts.uncached),
}
"""The orders of waiting requests by name; other packages add theirs (`backend.extensions`)."""

EXPIRIES: dict[Overload, Callable[[Forecaster], Expiry]] = {
    Overload.DEADLINE: lambda forecaster: DeadlineExpiry(forecaster.alone),
    Overload.BOUNDED: lambda forecaster: NoExpiry(),
    Overload.UNBOUNDED: lambda forecaster: NoExpiry(),
}
"""The rule by which sequences expire, by the rule of overload control; other packages add theirs."""


def raise_failure(error: Exception) -> None:
    """Raise the exception of an observer at the event that it observed."""
    raise error


def make_core(
    config: CoreConfig,
    engine: EngineConfig,
    model: StepTimeModel | None = None,
    observer_failed: Callable[[Exception], object] = raise_failure,
    others: Listed[StepTimeModel] = (),
) -> Controller:
    """Make a fresh core; a given `model` keeps its learned state, and so do the step times of `others`, the further
    models. `observer_failed` is called with the exception of an observer.
    """
    model = model or StepTimeModel(replace(PRIOR_STEP_TIME, expert_reads=engine.expert_reads_of(0)))
    models, lengths = [model, *others], OutputLengths()
    tariffs = Tariffs(map(EngineTimeTariff, models))
    share = Share(config.weights, config.burst_s)
    backlog, drain = Backlog(tariffs.estimate, engine.shares_blocks), DrainMeter()
    spare = Share(config.weights, config.burst_s)
    parts = OrderParts(config, engine, share, lengths, tariffs, backlog)
    order = ORDERS[config.order](parts)
    fair = order if isinstance(order, DueOrder) else None
    spare_order = DueOrder(spare, class_offsets(0.0), parts.cost, parts.uncached)
    queue = SpareLast(order, spare_order)
    pipeline = Pipeline()
    copy_time = CopyTime(engine, pipeline)
    adapter_time = AdapterTime(engine)
    ledger = Ledger(share, spare, tariffs, copy_time, adapter_time)
    sizer = PrefillSizer(engine, model, copy_time, config.prefill_share, others)
    forecast = FuturePeak(engine, lengths, config.memory_risk)
    swap_choice = SwapChoice(config.swap, engine, model)
    retention = MeasuredRetention() if config.between_turns is BetweenTurnsRule.MEASURED else None
    gate = _gate(config, forecast)
    spare_sizer = SpareSizer(sizer, config.spare_share)
    hooks = TenantHooks(queue.due, ledger, sizer, spare_sizer, gate, forecast, swap_choice, retention, fair)
    scheduler = Scheduler(engine, queue, hooks)
    forecaster = Forecaster(scheduler, order, backlog, pipeline, models, lengths, adapter_time)
    control = AdmissionControl(_overload_config(config), scheduler, backlog, drain, lengths, forecaster, pipeline, fair)
    expiry = EXPIRIES[config.overload](forecaster)
    return Controller(
        scheduler, queue, ledger, copy_time, pipeline, control, expiry, models, config.calibration, observer_failed
    )


def _overload_config(config: CoreConfig) -> OverloadConfig:
    if config.overload is Overload.UNBOUNDED:
        return OverloadConfig(deadlines=False, class_bounds=False)
    values = [getattr(config, name) for name in _BOUNDS]
    ours, theirs = QueueBounds(*values[: len(_UNITS)]), QueueBounds(*values[len(_UNITS) :])
    return OverloadConfig(ours, theirs, config.overload is Overload.DEADLINE, config.confidence)


def _gate(config: CoreConfig, forecast: FuturePeak) -> Gate:
    match config.memory:
        case MemoryGate.FORECAST:
            return forecast
        case MemoryGate.MINIMUM_FREE:
            return lambda sequence, running, num_free, num_held, num_kept: num_free >= config.min_free_blocks
        case MemoryGate.OPTIMISTIC:
            return lambda sequence, running, num_free, num_held, num_kept: True
