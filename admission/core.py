"""The core as one is configured: which ordering, what is charged, how memory is admitted to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from admission.aging import Aging
from admission.controller import Controller, TenantPolicy
from admission.fair_queue import FairQueue
from admission.ledger import EngineTimeTariff, Ledger, Tariff, TokenTariff
from admission.memory import FuturePeak, Gate, MinimumFree, Optimistic
from admission.ordering import ArrivalOrder, Ordering
from admission.orderings.earliest_deadline import EarliestDeadlineFirst
from admission.orderings.round_robin import RequestRoundRobin
from admission.orderings.shortest_first import ShortestPredictedFirst
from admission.orderings.virtual_finish import VirtualFinishWithBoost
from admission.orderings.virtual_token_counter import VirtualTokenCounter
from admission.output_length import OutputLengths
from admission.pace import Pace
from admission.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from backend.sequence import Sequence
from backend.waiting import HoldingQueue

PRIOR = StepTime((2e-3, 5e-5, 5e-5, 1e-7, 1e-7, 1e-9, 1e-6))
"""Before anything was measured: a small model on a slow device, which a few dozen steps correct."""


Estimate = Callable[[Sequence], float]


class Order(StrEnum):
    """Who is admitted next."""

    FAIR = "fair"
    FCFS = "fcfs"
    ROUND_ROBIN = "round_robin"
    SHORTEST_FIRST = "shortest_first"
    VTC = "vtc"
    VIRTUAL_FINISH = "virtual_finish"
    EARLIEST_DEADLINE = "earliest_deadline"


class Unit(StrEnum):
    """What tenants are charged in."""

    ENGINE_TIME = "engine_time"
    TOKENS = "tokens"


class Memory(StrEnum):
    """When a sequence may join those running."""

    FORECAST = "forecast"
    MINIMUM_FREE = "minimum_free"
    OPTIMISTIC = "optimistic"


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Choices of the core. Raises `ValueError` naming the field."""

    order: Order = Order.FAIR
    unit: Unit = Unit.ENGINE_TIME
    quantum: float = 0.05  # in the unit, for a tenant of weight 1: seconds of engine time, or tokens
    borrow: float = 0.25  # what a tenant may be in debt and still have urgent work admitted, in the unit
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 where it says nothing
    seconds_per_class: float = 2.0  # of waiting, that make up for one class
    memory: Memory = Memory.FORECAST
    min_free_blocks: int = 0
    prefill_share: float = 1.0  # of the token budget, where no decode was promised an interval
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in ("quantum", "seconds_per_class", "max_waiting"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"weights.{tenant} must be above 0, got {weight}")


def make_core(config: CoreConfig, engine: EngineConfig, model: StepTimeModel | None = None) -> Controller:
    """A core that has seen nothing yet, or with a step-time model that has."""
    model = model or StepTimeModel(PRIOR)
    lengths = OutputLengths()
    tariff: Tariff = EngineTimeTariff(model) if config.unit is Unit.ENGINE_TIME else TokenTariff()
    ordering = _ORDERINGS[config.order](config, _estimate(tariff, lengths))
    ledger = Ledger(ordering, tariff, model)
    pace = Pace(engine, model, config.prefill_share)
    forecast = FuturePeak(engine, lengths)
    policy = TenantPolicy(ordering, ledger, pace, _gate(config, forecast), forecast, lengths)
    waiting = ordering if isinstance(ordering, FairQueue) else HoldingQueue(ordering)
    return Controller(engine, ordering, waiting, ledger, policy, lengths, config.max_waiting)


def _gate(config: CoreConfig, forecast: FuturePeak) -> Gate:
    if config.memory is Memory.FORECAST:
        return forecast
    return MinimumFree(config.min_free_blocks) if config.memory is Memory.MINIMUM_FREE else Optimistic()


def _estimate(tariff: Tariff, lengths: OutputLengths) -> Estimate:
    """What a whole sequence will cost, as far as can be known when it arrives."""
    return lambda s: tariff.estimate(len(s.prompt), lengths.mean(s.tenant, s.max_tokens))


def _deadline(config: CoreConfig) -> Callable[[Sequence], float]:
    """Classes differ by the wait that makes up for one; the most urgent has as much."""
    return lambda s: s.arrival + (s.priority_class + 1) * config.seconds_per_class


def _fair(config: CoreConfig, _: Estimate) -> Ordering:
    return FairQueue(config.quantum, Aging(config.seconds_per_class), config.weights, config.borrow)


_ORDERINGS: dict[Order, Callable[[CoreConfig, Estimate], Ordering]] = {
    Order.FAIR: _fair,
    Order.FCFS: lambda config, estimate: ArrivalOrder(),
    Order.ROUND_ROBIN: lambda config, estimate: RequestRoundRobin(),
    Order.SHORTEST_FIRST: lambda config, estimate: ShortestPredictedFirst(estimate),
    Order.VTC: lambda config, estimate: VirtualTokenCounter(config.weights),
    Order.VIRTUAL_FINISH: lambda config, estimate: VirtualFinishWithBoost(estimate, config.weights),
    Order.EARLIEST_DEADLINE: lambda config, estimate: EarliestDeadlineFirst(_deadline(config)),
}
