"""Sessions go on once they are answered."""

from labs.simulation.arrival import Arrival, Turn
from labs.simulation.contents import Content
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import simulate_run


def test_a_session_goes_on_its_wait_after_each_answer_and_finds_what_was_said() -> None:
    turns = (Turn(7.0, 40, 20, expects=5.0), Turn(2.0, 30, 20))
    first = Arrival(1.0, 160, 20, 3, "t", content=Content.of_session(3), expects=7.0, turns=turns)
    device = DEVICES["llama3-8b-a100"]
    run = simulate_run(parse_simulated_policy("fcfs,num_blocks=200", device), [first], device, Objective())
    assert (run.offered, run.completed, run.sessions) == (3, 3, 1)
    answers = run.session_seconds - 7.0 - 2.0
    assert 0.5 < answers < 5.0, "three answers of twenty tokens, and the waits between them"
    prompts = (160, 160 + 20 + 40, 160 + 20 + 40 + 20 + 30)
    assert run.hit_rate * sum(prompts) >= 160 + 220, "each turn finds what came before it"


def test_the_next_turn_begins_with_all_that_was_said() -> None:
    first = Arrival(1.0, 160, 20, expects=7.0, turns=(Turn(7.0, 40, 30, expects=5.0),))
    second = first.next_turn(10.0)
    assert second is not None and (second.time, second.began) == (17.0, 1.0)
    assert (second.prompt_tokens, second.output_tokens, second.expects) == (220, 30, 5.0)
    assert second.next_turn(20.0) is None
