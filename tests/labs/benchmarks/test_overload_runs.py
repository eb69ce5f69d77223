"""The figures by which a run under overload is judged."""

from collections.abc import Sequence

import pytest

from labs.benchmarks.overload_runs import KeptPromise, Run, simulate
from labs.simulation.arrival import Arrival
from labs.simulation.recorder import AttemptOutcome

GOOD, LATE, REFUSED = AttemptOutcome.GOOD, AttemptOutcome.LATE, AttemptOutcome.REFUSED


def run_of(outcomes: Sequence[AttemptOutcome], promises: Sequence[KeptPromise] = ()) -> Run:
    """Requests of 100, 200, ... tokens, one each second, of which every second is tenant b's."""
    arrivals = [Arrival(float(n), 100 * (n + 1), 0, n, "ab"[n % 2]) for n in range(len(outcomes))]
    return Run(arrivals, dict(enumerate(outcomes)), 1.0, list(promises), {})


def promised(held: Sequence[bool], tenant: str = "a") -> list[KeptPromise]:
    return [KeptPromise(n, tenant, 1.0, 6.0, 0.5 if kept else None, 2.0) for n, kept in enumerate(held)]


def test_everybody_offered_is_in_the_denominator() -> None:
    run = run_of([GOOD, LATE, REFUSED, REFUSED])
    assert (run.good, run.missed, run.refused) == (0.25, 0.25, 0.5)
    assert run.good_tokens == 0.1


def test_the_longest_quarter_is_held_against_the_shortest() -> None:
    run = run_of([GOOD, GOOD, GOOD, LATE, GOOD, REFUSED, GOOD, REFUSED])
    assert run.by_length == [1.0, 0.5, 0.5, 0.5] and run.longest_over_shortest == 0.5


def test_the_worst_tenant_and_the_worst_window_are_found() -> None:
    run = run_of([GOOD] * 30 + [REFUSED, GOOD] * 15 + [GOOD] * 40)
    assert run.worst_window == 0.5
    assert run.worst_tenant == pytest.approx(35 / 50)


def test_windows_of_promises_are_not_their_mean() -> None:
    even, uneven = [n % 10 != 9 for n in range(1000)], [n >= 100 for n in range(1000)]
    assert run_of([GOOD], promised(even)).covered() == 1.0
    uneven_run = run_of([GOOD], promised(uneven))
    assert uneven_run.coverage == 0.9
    assert uneven_run.covered() < 0.05


def test_the_worst_tenants_promises_and_the_width_of_completions_are_shown() -> None:
    run = run_of([GOOD], promised([True] * 100) + promised([True] * 40 + [False] * 60, "b"))
    assert run.coverage == 0.7 and run.worst_covered_tenant == 0.4
    assert run.told_over_true == 3.0


def test_a_request_is_judged_by_its_own_deadline_and_its_promise_is_kept() -> None:
    arrivals = [Arrival(0.0, 6000, 10, session=0, tenant="a", deadline=0.9)]
    arrivals.append(Arrival(1.0, 6000, 10, session=1, tenant="a", deadline=0.5))
    run = simulate("order=fair,overload=deadline", arrivals)
    assert [run.by_session[n] for n in (0, 1)] == [GOOD, AttemptOutcome.EXPIRED]
    first, second = run.promises
    assert first.first is not None and first.last is not None and 0.5 < first.first < first.last < 0.9
    assert (second.first, second.last) == (None, None)
    assert run.p99_of(("a",)) == first.first
