"""What a class of service promises."""

from typing import NamedTuple


class Target(NamedTuple):
    """In seconds; None: nothing."""

    first_token: float | None = None
    interval: float | None = None  # between tokens
    refuses: bool = False  # what would be late for its first token


NO_TARGET = Target()
