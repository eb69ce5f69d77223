from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.search.replicas import GOOD_SHARE, Replica, recommended_len, replicas_for

RANDOM = Random(1)
DEVICE = DEVICES["llama3-8b-a100"]
REPLICA = Replica(
    parse_simulated_policy("max_model_len=8192,max_num_seqs=32", DEVICE),
    DEVICE,
    tuple(Arrival(float(n), RANDOM.randint(50, 3000), RANDOM.randint(2, 30)) for n in range(200)),
    Objective(0.6, 0.2),
    requests=40,
)


def test_the_knee_is_the_largest_good_rate() -> None:
    done: list[int] = []
    knee = REPLICA.knee(done.append)
    assert knee is not None and knee.run.goodput >= GOOD_SHARE and 0 < knee.rate < knee.capacity
    assert REPLICA.at(1.8 * knee.rate).goodput < GOOD_SHARE
    assert sum(done) == 7 * 40
    near = REPLICA.knee_near(knee, done.append)
    assert near is not None and near.rate == pytest.approx(knee.rate, rel=0.1) and near.rate < knee.capacity


def test_changes_move_the_knee_where_they_should() -> None:
    knee = REPLICA.knee(lambda _: None)
    assert knee is not None
    quick = REPLICA.with_steps(0.8).knee_near(knee, lambda _: None)
    assert quick is not None and quick.rate > knee.rate
    longer = REPLICA.with_answers(1.5)
    assert [one.output_tokens for one in longer.arrivals[:3]] == [
        round(1.5 * one.output_tokens) for one in REPLICA.arrivals[:3]
    ]
    assert all(one.prompt_tokens + one.output_tokens <= 8192 for one in REPLICA.with_prompts(6).arrivals)
    assert REPLICA.with_first_token(0.5).objective.first_token == 0.3


@given(rate=st.floats(0.01, 1e4), knee=st.floats(0.01, 100))
def test_replicas_are_enough_and_none_is_spare(rate: float, knee: float) -> None:
    number = replicas_for(rate, knee)
    assert number * knee >= rate * (1 - 1e-6)
    assert number == 1 or (number - 1) * knee < rate


@given(st.lists(st.integers(1, 20_000), min_size=1), st.floats(0.5, 1.0))
def test_a_recommended_length_holds_the_share(lengths: list[int], share: float) -> None:
    arrivals = [Arrival(0.0, length, 1) for length in lengths]
    wanted = recommended_len(arrivals, 8192, share)
    assert wanted == 8192 or (
        wanted % 1024 == 0 and sum(length + 1 <= wanted for length in lengths) >= share * len(lengths) - 1e-9
    )
