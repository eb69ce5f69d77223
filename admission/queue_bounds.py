"""How much may wait."""

from dataclasses import dataclass

from admission.load import Load

_UNITS = {"count": "requests", "tokens": "tokens", "bytes": "bytes", "seconds": "seconds of engine time"}


@dataclass(frozen=True, slots=True)
class Excess:
    """A bound that one more request would pass: its unit, its value, and what there would be."""

    unit: str
    bound: float
    load: float

    def __str__(self) -> str:
        return f"{self.load:,.6g} {_UNITS[self.unit]} would wait, at most {self.bound:,.6g} may"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The most of each unit; None: as much as comes. Raises `ValueError` naming the bound."""

    count: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    seconds: float | None = None  # predicted, of the engine's time

    def __post_init__(self) -> None:
        for unit, name in _UNITS.items():
            bound = getattr(self, unit)
            if bound is not None and not bound > 0:
                raise ValueError(f"a bound on waiting {name} must be above 0, got {bound}")

    def times(self, factor: float) -> "QueueBounds":
        """So many times as much of each unit; of requests at least one."""
        count = None if self.count is None else max(1, int(factor * self.count))
        tokens = None if self.tokens is None else max(1, int(factor * self.tokens))
        size = None if self.bytes is None else max(1, int(factor * self.bytes))
        return QueueBounds(count, tokens, size, None if self.seconds is None else factor * self.seconds)

    def excess(self, waiting: Load, newcomer: Load) -> Excess | None:
        """The first bound that the newcomer would pass. An empty queue takes anything: it can only run at once."""
        if waiting.count == 0:
            return None
        for unit in _UNITS:
            bound, load = getattr(self, unit), getattr(waiting, unit) + getattr(newcomer, unit)
            if bound is not None and load > bound:
                return Excess(unit, bound, load)
        return None
