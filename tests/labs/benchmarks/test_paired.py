from random import Random

import pytest

from labs.benchmarks.paired import median_difference, signed_rank_p

DEPRESSION = [-0.952, 0.147, -1.022, -0.430, -0.620, -0.590, -0.490, 0.080, -0.010]  # Hollander and Wolfe, table 3.1


def test_the_published_example_has_its_published_figures() -> None:
    """Exactly p = 0.0391 and -0.46; the normal approximation of nine pairs is a little off."""
    assert signed_rank_p(DEPRESSION) == pytest.approx(0.0391, abs=0.006)
    assert median_difference(DEPRESSION, 0.95).estimate == pytest.approx(-0.46)


def test_an_interval_has_what_it_is_of_as_often_as_it_says_and_agrees_with_the_test() -> None:
    random, inside = Random(3), 0
    for _ in range(200):
        drawn = [random.gauss(0.3, 1) for _ in range(60)]
        interval = median_difference(drawn, 0.9)
        assert interval.low < interval.estimate < interval.high <= interval.farthest or interval.low < 0
        inside += interval.low <= 0.3 <= interval.high
        assert (signed_rank_p(drawn) < 0.05) == (median_difference(drawn, 0.95).low > 0)
    assert 170 <= inside <= 190
