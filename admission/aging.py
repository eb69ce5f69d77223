"""Priority classes: the seconds by which requests of a lower class are due later."""

from backend.scheduler.sequence import SPARE_CLASS

Aging = tuple[float, ...]
"""By class, the seconds by which its requests are due later than those of the most urgent class; never falling."""


def class_offsets(seconds_per_class: float = 2.0, first: Aging = ()) -> Aging:
    """Return the offsets of all classes: `first` of the first ones, and `seconds_per_class` more for each further one.
    Raises `ValueError`.
    """
    if not seconds_per_class >= 0:
        raise ValueError(f"seconds_per_class must be at least 0, got {seconds_per_class}")
    if list(first) != sorted(first):
        raise ValueError(f"offsets must not fall from class to class, got {first}")
    first = first or (0.0,)
    return (*first, *[first[-1] + n * seconds_per_class for n in range(1, SPARE_CLASS + 2 - len(first))])
