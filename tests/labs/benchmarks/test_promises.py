"""What is promised on a machine that others use too, and how narrow it could be."""

import pytest

from admission.step_times.step_time import StepWork
from labs.benchmarks.overload_loads import DEVICE
from labs.benchmarks.overload_runs import KeptPromise, Run
from labs.benchmarks.promises import STARVED_SPEED, Promised, Starvation, predictable, promised
from labs.simulation.arrival import Arrival
from labs.simulation.recorder import AttemptOutcome

WORK = StepWork(prefill_tokens=512)


def test_a_starved_machine_is_slow_for_half_of_the_time_and_each_seed_the_same() -> None:
    starvation, again = Starvation(1), Starvation(1)
    own, slow = DEVICE.seconds(WORK), 0
    for n in range(20_000):
        starvation.now = again.now = n / 10
        seconds = starvation.seconds(WORK)
        assert seconds in (own, own / STARVED_SPEED) and seconds == again.seconds(WORK)
        slow += seconds > own
    assert slow / 20_000 == pytest.approx(0.5, abs=0.1)


def test_steps_take_longer_when_it_is_starved() -> None:
    arrivals = [Arrival(30.0 * n, 6000, 10, session=n, tenant="a", deadline=9.0) for n in range(20)]
    times = [
        {round(p.first or 0.0, 2) for p in promised(arrivals, "", each).promises} for each in (None, Starvation(1))
    ]
    assert len(times[0]) == 1 and len(times[1]) > 1 and min(times[1]) == min(times[0])


def of(promises: list[KeptPromise], outputs: list[int]) -> Promised:
    arrivals = [Arrival(float(n), 10, output, n, "a") for n, output in enumerate(outputs)]
    return Promised(Run(arrivals, dict.fromkeys(range(len(outputs)), AttemptOutcome.GOOD), 1.0, promises, {}))


def test_an_oracle_of_lengths_is_as_wide_as_they_differ() -> None:
    def promise(length: int) -> KeptPromise:
        return KeptPromise(0, "a", 2.0, 9.0, 1.0, 1.0 + 0.1 * (length - 1), 10, length)

    assert of([promise(11)] * 9, [11] * 9).oracle_over_true == pytest.approx(1.0)
    assert of([promise(11)] * 9, [11] * 5 + [31] * 4).oracle_over_true == pytest.approx(2.0)


def test_the_worst_quartile_of_prompts_is_found() -> None:
    promises = [KeptPromise(n, "a", 1.0, 9.0, 0.5 if n < 75 or n % 2 else 1.5, 2.0, n) for n in range(100)]
    assert of(promises, [1]).worst_quartile == pytest.approx(0.5, abs=0.03)
    assert of(promises, [1]).once_learned == pytest.approx(0.75, abs=0.03)


def test_predictable_answers_differ_by_little() -> None:
    lengths = sorted(arrival.output_tokens for arrival in predictable().trace)
    assert lengths[0] == 170 and lengths[-1] == 230
