import random

from hypothesis import given
from hypothesis import strategies as st

from admission.step_times.least_squares import NUM_COEFFICIENTS, Evidence, solve_non_negative


def evidence_of(rows: list[list[float]], values: list[float]) -> Evidence:
    evidence = Evidence()
    columns = [[row[place] for row in rows] for place in range(NUM_COEFFICIENTS)]
    evidence.add(columns, values, [1.0] * len(rows), 1.0)
    return evidence


@given(st.integers(0, 10_000))
def test_no_other_coefficients_that_are_at_least_0_fit_better(seed: int) -> None:
    """At the minimum of a convex function, no coefficient can be moved the way that is left to it (Karush, 1939)."""
    rng = random.Random(seed)
    rows = [[rng.choice((0.0, rng.gauss(0, 1))) for _ in range(NUM_COEFFICIENTS)] for _ in range(rng.randint(1, 30))]
    evidence = evidence_of(rows, [rng.gauss(0, 1) for _ in rows])
    found = solve_non_negative(evidence.gram, evidence.moment)
    for value, row, moment in zip(found, evidence.gram, evidence.moment, strict=True):
        slope = sum(x * y for x, y in zip(row, found, strict=True)) - moment
        assert value >= 0 and slope >= -1e-6
        assert abs(slope) <= 1e-6 or value == 0


def test_a_coefficient_without_evidence_is_0() -> None:
    evidence = evidence_of([[1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]], [3.0])
    found = solve_non_negative(evidence.gram, evidence.moment)
    assert abs(found[0] + 2 * found[1] - 3) < 1e-6 and found[2:] == [0.0] * 5


def test_coefficients_that_are_nearly_the_same_are_told_apart() -> None:
    """Twenty sweeps of coordinate descent would still be far away."""
    rng = random.Random(1)
    rows = [[1.0, 1.0 + 0.01 * rng.random(), *[rng.random() for _ in range(5)]] for _ in range(50)]
    true = [3.0, 1.0, 0.5, 0.0, 2.0, 0.1, 0.7]
    evidence = evidence_of(rows, [sum(x * y for x, y in zip(row, true, strict=True)) for row in rows])
    found = solve_non_negative(evidence.gram, evidence.moment)
    assert all(abs(x - y) < 1e-4 for x, y in zip(found, true, strict=True))
