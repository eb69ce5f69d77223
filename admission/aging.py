"""Priority classes that age: a lower class waits longer, never forever.

A sequence of class k (0 is the most urgent) that has waited w seconds ranks as `k - w / A`. Since w grows for all at
the same pace, the order is that of the static key `arrival + k * A`, and nothing is ever re-sorted. A sequence is
overtaken only by higher classes that arrive within (k - k') * A seconds after it, so its wait has a bound.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aging:
    """`seconds_per_class` is A: what waiting is worth one class."""

    seconds_per_class: float = 2.0

    def __post_init__(self) -> None:
        if not self.seconds_per_class >= 0:
            raise ValueError(f"seconds_per_class must be at least 0, got {self.seconds_per_class}")

    def key(self, arrival: float, priority_class: int) -> float:
        """Smaller goes first. `arrival` in seconds."""
        return arrival + priority_class * self.seconds_per_class

    def overtaking_window(self, priority_class: int, by_class: int) -> float:
        """Seconds after its arrival in which a sequence can be overtaken by newcomers of `by_class`."""
        return max(0.0, (priority_class - by_class) * self.seconds_per_class)
