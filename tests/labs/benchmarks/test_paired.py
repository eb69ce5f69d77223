from random import Random

import pytest

from labs.benchmarks.paired import median_difference, power, signed_rank_p

DEPRESSION = [-0.952, 0.147, -1.022, -0.430, -0.620, -0.590, -0.490, 0.080, -0.010]  # Hollander and Wolfe, table 3.1


def test_the_published_example_has_its_published_figures() -> None:
    """Exactly p = 0.0391 and -0.46; the normal approximation of nine pairs is a little off."""
    assert signed_rank_p(DEPRESSION) == pytest.approx(0.0391, abs=0.006)
    assert median_difference(DEPRESSION, 0.95).estimate == pytest.approx(-0.46)


def test_differences_of_nothing_count_for_nothing_and_equal_ones_share_their_ranks() -> None:
    assert signed_rank_p([]) == signed_rank_p([0.0, 0.0]) == 1.0
    assert signed_rank_p([0.0, *DEPRESSION]) == signed_rank_p(DEPRESSION)
    assert signed_rank_p([1.0, -1.0] * 20) == 1.0
    assert signed_rank_p([1.0] * 20) < 1e-4


def test_an_interval_has_what_it_is_of_as_often_as_it_says_and_agrees_with_the_test() -> None:
    random, inside = Random(3), 0
    for _ in range(200):
        drawn = [random.gauss(0.3, 1) for _ in range(60)]
        interval = median_difference(drawn, 0.9)
        assert interval.low < interval.estimate < interval.high <= interval.farthest or interval.low < 0
        inside += interval.low <= 0.3 <= interval.high
        assert (signed_rank_p(drawn) < 0.05) == (median_difference(drawn, 0.95).low > 0)
    assert 170 <= inside <= 190


def test_the_power_is_the_level_where_there_is_nothing_to_find_and_grows_with_it() -> None:
    random = Random(1)
    drawn = [random.gauss(5, 1) for _ in range(200)]
    nothing, little, much = (power(drawn, shift, 0.05, resamples=400) for shift in (0.0, 0.15, 0.4))
    assert 0.02 <= nothing <= 0.09
    assert nothing < little < 0.9 < much
