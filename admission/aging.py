"""Priority classes: how much later what is of a lower class is due."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aging:
    """`seconds_per_class` is A: what waiting is worth one class; `offsets` are those of the first classes instead."""

    seconds_per_class: float = 2.0
    offsets: tuple[float, ...] = ()  # seconds by class, never falling

    def __post_init__(self) -> None:
        if not self.seconds_per_class >= 0:
            raise ValueError(f"seconds_per_class must be at least 0, got {self.seconds_per_class}")
        if list(self.offsets) != sorted(self.offsets):
            raise ValueError(f"offsets must not fall from class to class, got {self.offsets}")

    def offset(self, priority_class: int) -> float:
        """Returns the seconds by which the class ranks behind the most urgent one."""
        if not self.offsets:
            return priority_class * self.seconds_per_class
        beyond = max(0, priority_class + 1 - len(self.offsets))
        return self.offsets[min(priority_class, len(self.offsets) - 1)] + beyond * self.seconds_per_class
