"""How many random examples a test runs."""

from hypothesis import settings

NIGHTLY = "nightly"  # the profile of Hypothesis under `scripts/test --all`
FACTOR = 20


def examples(number: int, at_night: int | None = None) -> int:
    """Returns how many of something random to try: `number`, and at night `at_night` or twenty times as many."""
    if settings.get_current_profile_name() != NIGHTLY:
        return number
    return number * FACTOR if at_night is None else at_night
