import pytest

from labs.benchmarks.ceilings import Bound, Chosen, least_seconds, look_ahead
from labs.benchmarks.overload import OURS
from labs.benchmarks.overload_loads import TENANTS, drawn_trace
from labs.benchmarks.overload_runs import simulate
from labs.simulation.arrival import Arrival


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    """Twice of what the machine can do, for some seconds."""
    drawn = drawn_trace(count=120)
    return [
        one._replace(time=0.1 * number, session=number, tenant=TENANTS[number % 4], max_tokens=1024, deadline=2.0)
        for number, one in enumerate(drawn)
    ]


def test_no_run_has_more_than_the_bound(arrivals: list[Arrival]) -> None:
    bound = Bound(arrivals)
    for run in (simulate(OURS, arrivals), look_ahead(arrivals, 0.96)):
        assert 0.3 < run.good <= bound.good < 1
        assert run.good_tokens <= bound.tokens < 1


def test_a_policy_that_cannot_know_lengths_of_answers_has_fewer_tokens(arrivals: list[Arrival]) -> None:
    assert Bound(arrivals, [arrival.output_tokens for arrival in arrivals]).tokens < Bound(arrivals).tokens


def test_a_prompt_takes_no_less_than_its_part_of_full_steps() -> None:
    prompt, more = least_seconds(Arrival(0.0, 512, 1))
    assert prompt == pytest.approx(14.936e-3 + 512 * 81.3e-6) and more == 0


def test_chosen_requests_can_all_meet_their_deadlines() -> None:
    chosen = Chosen()
    assert chosen.add(0.0, 4.0, 8.0)
    assert chosen.add(1.0, 0.5, 1.7), "it is due earlier, and goes first"
    assert not chosen.add(1.1, 0.5, 1.9)
    assert chosen.add(1.1, 0.5, 2.1)
    assert not chosen.add(2.0, 4.5, 9.0), "0.5 s would be lacking"
    assert chosen.add(2.0, 3.9, 9.0)
    assert chosen.add(20.0, 1.0, 21.0)
