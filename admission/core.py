"""Makes a core from its configuration: its ordering, its unit of account, and its admission to memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from admission.aging import Aging
from admission.backlog import Backlog, DrainMeter
from admission.controller import Controller
from admission.estimate import Estimator
from admission.expiry import ControlledDelay, DeadlineExpiry, Expiry, NoExpiry
from admission.kv.copy_time import CopyTime
from admission.kv.memory import RISK, FuturePeak, Gate, MinimumFree, Optimistic
from admission.kv.predicted_length import PredictedLength
from admission.kv.retention import Between, make_retention
from admission.kv.swap_choice import Swap, SwapChoice
from admission.ledger import EngineTimeTariff, Ledger, Tariff, TokenTariff
from admission.length_predictor import LengthPredictor
from admission.orderings.adaptive_lifo import AdaptiveLifo
from admission.orderings.by_key import EarliestDeadlineFirst, ShortestPredictedFirst
from admission.orderings.by_tenant import RequestRoundRobin, VirtualTokenCounter
from admission.orderings.fair_queue import FairQueue
from admission.orderings.learned_rank import LearnedRank
from admission.orderings.least_laxity import LeastLaxityFirst
from admission.orderings.length_groups import LengthGroups
from admission.orderings.magnus import Magnus
from admission.orderings.ordering import ArrivalOrder, ListedOrdering
from admission.orderings.response_ratio import HighestResponseRatioNext
from admission.orderings.tenant_queue import OrderInTenant
from admission.orderings.virtual_finish import VirtualFinishWithBoost
from admission.output_length import OutputLengths
from admission.overload import AdmissionControl, OverloadConfig
from admission.predicted import Predicted
from admission.prefill_sizer import PrefillSizer
from admission.scheduling_policy import Prefer, QueueBounds
from admission.step_times.step_time import Pipeline, StepTime, StepTimeModel
from admission.tenant_hooks import TenantHooks
from backend.config import EngineConfig
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import HoldingQueue

PRIOR = StepTime((2e-3, 5e-5, 5e-5, 1e-7, 1e-7, 1e-9, 1e-6))
"""Before anything was measured: a small model on a slow device, which a few dozen steps correct."""

_UNITS = ("", "_tokens", "_bytes", "_seconds")  # of bounds, as `QueueBounds` has them
_BOUNDS = tuple(f"{whose}max_waiting{unit}" for whose in ("", "tenant_") for unit in _UNITS)


class Order(StrEnum):
    """The ordering by which waiting sequences are admitted."""

    FAIR = "fair"
    FCFS = "fcfs"
    ROUND_ROBIN = "round_robin"
    SHORTEST_FIRST = "shortest_first"
    VTC = "vtc"
    VIRTUAL_FINISH = "virtual_finish"
    EARLIEST_DEADLINE = "earliest_deadline"
    ADAPTIVE_LIFO = "adaptive_lifo"
    LEARNED_RANK = "learned_rank"
    LENGTH_GROUPS = "length_groups"
    LEAST_LAXITY = "least_laxity"
    RESPONSE_RATIO = "response_ratio"
    MAGNUS = "magnus"


class Unit(StrEnum):
    """The unit of account in which tenants are charged."""

    ENGINE_TIME = "engine_time"
    TOKENS = "tokens"


class MemoryGate(StrEnum):
    """The rule by which a sequence may join those running."""

    FORECAST = "forecast"
    MINIMUM_FREE = "minimum_free"
    OPTIMISTIC = "optimistic"
    PREDICTED = "predicted"


class Overload(StrEnum):
    """The way to deal with more work than the machine can do. All but the last keep the bounds on the queue and those
    of its classes; what a tenant may have waiting by its own limits holds under each.
    """

    DEADLINE = "deadline"  # what cannot be in time is refused at once, and given up when its time has passed
    CONTROLLED_DELAY = "controlled_delay"  # CoDel: what has waited too long is given up
    BOUNDED = "bounded"
    UNBOUNDED = "unbounded"


class Scale(NamedTuple):
    """The fields of `CoreConfig` that are in the unit of account."""

    quantum: float
    debt_limit: float
    deadline_debt_limit: float


SCALES = {Unit.ENGINE_TIME: Scale(0.05, 0.25, 4.0), Unit.TOKENS: Scale(512.0, 2560.0, 40_960.0)}
"""The defaults of a configuration in each unit."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Choices of the core. Raises `ValueError` naming the field."""

    order: Order = Order.FAIR
    unit: Unit = Unit.ENGINE_TIME
    quantum: float = 0.05  # in the unit, for a tenant of weight 1: seconds of engine time, or tokens
    debt_limit: float = 0.25  # what a tenant may be in debt and still have urgent work admitted, in the unit
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 where it says nothing
    seconds_per_class: float = 20.0  # of waiting, that make up for one class
    memory: MemoryGate = MemoryGate.FORECAST
    min_free_blocks: int = 0
    memory_risk: float = RISK  # of the forecast
    calibration: bool = True  # whether steps are run for what they take, before the first and while there are none
    swap: Swap = Swap.MEASURED
    between_turns: Between = Between.MEASURED
    prefill_share: float = 1.0  # of the token budget, where no decode was promised an interval
    deadline_debt_limit: float = 4.0  # the same, for work to be served in the order of deadlines
    overtaking_seconds: float = 22.0  # in which shorter requests of a tenant may freely overtake; 0: never
    predicts_lengths: bool = True  # from prompts, for the order inside a tenant
    overload: Overload = Overload.DEADLINE
    confidence: float = 0.9  # that what is admitted meets its deadline
    prefer: Prefer = Prefer.BALANCED  # what overload spares, until a policy says otherwise
    max_waiting: int | None = 1024  # requests
    max_waiting_tokens: int | None = None
    max_waiting_bytes: int | None = None
    max_waiting_seconds: float | None = None  # predicted, of the engine's time
    tenant_max_waiting: int | None = None
    tenant_max_waiting_tokens: int | None = None
    tenant_max_waiting_bytes: int | None = None
    tenant_max_waiting_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("quantum", "seconds_per_class", *_BOUNDS):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if not self.overtaking_seconds >= 0:
            raise ValueError(f"overtaking_seconds must be at least 0, got {self.overtaking_seconds}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {self.confidence}")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"weights.{tenant} must be above 0, got {weight}")


def make_core(config: CoreConfig, engine: EngineConfig, model: StepTimeModel | None = None) -> Controller:
    """Makes a core that has seen nothing yet, unless its step-time model has."""
    model = model or StepTimeModel(PRIOR)
    lengths = OutputLengths()
    tariff: Tariff = EngineTimeTariff(model) if config.unit is Unit.ENGINE_TIME else TokenTariff()
    clock = tariff if isinstance(tariff, EngineTimeTariff) else EngineTimeTariff(model)
    goes_by_lengths = config.order in _RANKED or config.memory is MemoryGate.PREDICTED
    predictor = LengthPredictor() if config.predicts_lengths and goes_by_lengths else None
    predicted = Predicted(tariff, clock, lengths, predictor)
    ordering = _ORDERINGS[config.order](config, predicted, engine)
    pipeline = Pipeline()
    copy_time = CopyTime(engine, pipeline)
    ledger = Ledger(ordering, tariff, model, copy_time)
    sizer = PrefillSizer(engine, model, copy_time, config.prefill_share)
    forecast = FuturePeak(engine, lengths, config.memory_risk)
    swap_choice = SwapChoice(config.swap, engine, model)
    retention = make_retention(config.between_turns)
    gate = _gate(config, engine, forecast, predicted)
    hooks = TenantHooks(ordering, ledger, sizer, gate, forecast, lengths, swap_choice, retention, model, pipeline)
    waiting = ordering if isinstance(ordering, FairQueue) else HoldingQueue(ordering)
    scheduler = Scheduler(engine, waiting, hooks)
    aging = Aging(config.seconds_per_class)
    backlog, drain = Backlog(clock.estimate, aging, engine.shares_blocks), DrainMeter()
    estimator = Estimator(scheduler, ordering, backlog, pipeline, model, lengths, ledger.prepaid)
    control = AdmissionControl(_overload_config(config), scheduler, backlog, drain, lengths, estimator, pipeline)
    expiry = _expiry(config, estimator)
    return Controller(
        *(scheduler, ordering, ledger, copy_time, lengths, backlog, drain, pipeline, control, expiry, model),
        calibrates=config.calibration,
        predictor=predictor,
    )


def _overload_config(config: CoreConfig) -> OverloadConfig:
    if config.overload is Overload.UNBOUNDED:
        return OverloadConfig(deadlines=False, class_bounds=False)
    values = [getattr(config, name) for name in _BOUNDS]
    ours, theirs = QueueBounds(*values[: len(_UNITS)]), QueueBounds(*values[len(_UNITS) :])
    return OverloadConfig(ours, theirs, config.overload is Overload.DEADLINE, config.confidence, prefer=config.prefer)


def _expiry(config: CoreConfig, estimator: Estimator) -> Expiry:
    if config.overload is Overload.DEADLINE:
        return DeadlineExpiry(estimator.alone)
    return ControlledDelay() if config.overload is Overload.CONTROLLED_DELAY else NoExpiry()


def _gate(config: CoreConfig, engine: EngineConfig, forecast: FuturePeak, predicted: Predicted) -> Gate:
    if config.memory is MemoryGate.FORECAST:
        return forecast
    if config.memory is MemoryGate.PREDICTED:
        return PredictedLength(engine, predicted.output)
    return MinimumFree(config.min_free_blocks) if config.memory is MemoryGate.MINIMUM_FREE else Optimistic()


def _deadline(config: CoreConfig) -> Callable[[Sequence], float]:
    """Returns a function from a sequence to its deadline, of which one is made up by class where it has none:
    classes differ by the wait that makes up for one, and the most urgent has as much.
    """

    def deadline(s: Sequence) -> float:
        own = s.arrival + (s.priority_class + 1) * config.seconds_per_class
        return own if s.first_token_by is None else s.first_token_by

    return deadline


def _fair(config: CoreConfig, predicted: Predicted) -> FairQueue:
    aging = Aging(config.seconds_per_class)
    order = OrderInTenant(aging, config.overtaking_seconds, predicted.cost)
    return FairQueue(config.quantum, aging, config.weights, config.debt_limit, config.deadline_debt_limit, order)


_ORDERINGS: dict[Order, Callable[[CoreConfig, Predicted, EngineConfig], FairQueue | ListedOrdering]] = {
    Order.FAIR: lambda config, predicted, engine: _fair(config, predicted),
    Order.FCFS: lambda config, predicted, engine: ArrivalOrder(),
    Order.ROUND_ROBIN: lambda config, predicted, engine: RequestRoundRobin(),
    Order.SHORTEST_FIRST: lambda config, predicted, engine: ShortestPredictedFirst(predicted.cost),
    Order.VTC: lambda config, predicted, engine: VirtualTokenCounter(config.weights, predicted.cost),
    Order.VIRTUAL_FINISH: lambda config, predicted, engine: VirtualFinishWithBoost(predicted.cost, config.weights),
    Order.EARLIEST_DEADLINE: lambda config, predicted, engine: EarliestDeadlineFirst(_deadline(config)),
    Order.ADAPTIVE_LIFO: lambda config, predicted, engine: AdaptiveLifo(),
    Order.LEARNED_RANK: lambda config, predicted, engine: LearnedRank(predicted.output),
    Order.LENGTH_GROUPS: lambda config, predicted, engine: LengthGroups(),
    Order.LEAST_LAXITY: lambda config, predicted, engine: LeastLaxityFirst(
        _deadline(config), predicted.prefill_seconds
    ),
    Order.RESPONSE_RATIO: lambda config, predicted, engine: HighestResponseRatioNext(predicted.seconds),
    Order.MAGNUS: lambda config, predicted, engine: Magnus(
        predicted.output, predicted.seconds, engine.num_blocks * engine.block_size, engine.max_num_seqs
    ),
}
_RANKED = frozenset({Order.FAIR, Order.LEARNED_RANK, Order.RESPONSE_RATIO, Order.MAGNUS})
"""The orders that go by predicted lengths of answers, and learn to rank them."""
