"""Random runs of a whole core, as many as CI has time for; `scripts/prove_core.py` does a hundred thousand of each."""

from collections import Counter

import pytest

from admission.core import Unit
from tests.properties.core.random_runs import random_cancellations, random_schedule


@pytest.mark.parametrize("unit", Unit)
def test_the_service_of_backlogged_tenants_stays_within_the_bound_whatever_happens(unit: Unit) -> None:
    outcomes = [random_schedule(seed, unit) for seed in range(500)]
    assert max(outcome.share for outcome in outcomes) <= 1
    assert max(outcome.share for outcome in outcomes) > 0.3, "a bound that is never approached proves little"
    assert sum(outcome.preemptions for outcome in outcomes) > 500


def test_cancelling_in_any_state_leaves_nothing_behind() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        met += random_cancellations(seed)
    assert {"waiting", "in prefill", "decoding", "preempted", "finished"} <= met.keys()
