"""Priority classes: the seconds by which requests of a lower class are due later."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aging:
    """`offsets` are the seconds of the first classes; each further class adds `seconds_per_class`."""

    seconds_per_class: float = 2.0
    offsets: tuple[float, ...] = ()  # seconds by class, never falling

    def __post_init__(self) -> None:
        if not self.seconds_per_class >= 0:
            raise ValueError(f"seconds_per_class must be at least 0, got {self.seconds_per_class}")
        if list(self.offsets) != sorted(self.offsets):
            raise ValueError(f"offsets must not fall from class to class, got {self.offsets}")

    def offset(self, priority_class: int) -> float:
        """Return the seconds by which requests of the class are due later than those of the most urgent class."""
        if not self.offsets:
            return priority_class * self.seconds_per_class
        beyond = max(0, priority_class + 1 - len(self.offsets))
        return self.offsets[min(priority_class, len(self.offsets) - 1)] + beyond * self.seconds_per_class
