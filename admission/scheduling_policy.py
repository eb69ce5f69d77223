"""The core's policy: weights, classes and bounds, which an admin may change while the core runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from admission.backlog import Load

MAX_SHARED_QUEUE_FILL_BOUNDS = 2  # times its bound: the most that tenants within their shares may fill a shared queue


# fields of `QueueBounds` and of `Load`, with their names for people
_UNITS = {"count": "requests", "tokens": "tokens", "bytes": "bytes", "seconds": "seconds of engine time"}


@dataclass(frozen=True, slots=True)
class Excess:
    """A bound that one more request would pass: its unit, its value, and the amount with the request."""

    unit: str
    bound: float
    load: float

    def __str__(self) -> str:
        scale, unit = (2**20, "MiB") if self.unit == "bytes" else (1, _UNITS[self.unit])
        return f"{self.load / scale:,.6g} {unit} would wait, at most {self.bound / scale:,.6g} may"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most waiting work, in each unit; None: unbounded. Raises `ValueError` naming the bound."""

    count: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    seconds: float | None = None  # predicted, of the engine's time

    def __post_init__(self) -> None:
        for unit, name in _UNITS.items():
            bound = getattr(self, unit)
            if bound is not None and not bound > 0:
                raise ValueError(f"a bound on waiting {name} must be above 0, got {bound}")

    def excess(self, waiting: Load, newcomer: Load) -> Excess | None:
        """Return the first bound that the newcomer would pass. An empty queue takes any request: it can only run at
        once.
        """
        if waiting.count == 0:
            return None
        for unit in _UNITS:
            bound, load = getattr(self, unit), getattr(waiting, unit) + getattr(newcomer, unit)
            if bound is not None and load > bound:
                return Excess(unit, bound, load)
        return None

    def shared_excess(self, waiting: Load, own: Load, num_tenants: int, newcomer: Load) -> Excess | None:
        """Return the bound that the newcomer would pass in a queue shared by `num_tenants`, `own` being its tenant's
        part.

        A full queue refuses the tenants that fill it. A tenant within an equal share is admitted while twice the
        queue's bound has space for as much again as the tenant has waiting: of tenants that fill it one after another,
        each leaves half of that space to the next (dynamic thresholds: Choudhury and Hahne, 1998).
        """
        excess = self.excess(waiting, newcomer)
        if excess is None:
            return None
        sharing = num_tenants + (own.count == 0)
        is_within_share = self._scaled(over=sharing).excess(own, newcomer) is None
        has_space = self._scaled(times=MAX_SHARED_QUEUE_FILL_BOUNDS).excess(waiting + own, newcomer) is None
        return None if is_within_share and has_space else excess

    def _scaled(self, times: int = 1, over: int = 1) -> "QueueBounds":
        """Return the bounds times `times / over`; bounds in whole units stay at least 1."""
        count, tokens, size = (
            None if bound is None else max(1, bound * times // over) for bound in (self.count, self.tokens, self.bytes)
        )
        return QueueBounds(count, tokens, size, None if self.seconds is None else self.seconds * times / over)


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """The weights of tenants and the order and bounds of classes."""

    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant, see `share.weight_of`
    offsets: tuple[float, ...] = ()  # seconds by which each class ranks behind the first
    bounds: tuple[QueueBounds, ...] = ()  # on the waiting work of each class
    may_wait: Mapping[str, int] = field(default_factory=dict)  # waiting requests by tenant; "" stands for the others

    def most_waiting(self, tenant: str) -> int | None:
        """Return the most waiting requests of the tenant; None: unbounded."""
        return self.may_wait.get(tenant, self.may_wait.get("") if tenant not in self.weights else None)

    def bounds_of(self, priority_class: int) -> QueueBounds | None:
        return self.bounds[priority_class] if priority_class < len(self.bounds) else None
