"""How many random examples a test runs."""

from hypothesis import settings

NIGHTLY = "nightly"  # the profile of Hypothesis under `scripts/test --all`
FACTOR = 10


def examples(number: int) -> int:
    """Returns how many of something random to try: `number` for every change, ten times as many at night."""
    return number * FACTOR if settings.get_current_profile_name() == NIGHTLY else number
