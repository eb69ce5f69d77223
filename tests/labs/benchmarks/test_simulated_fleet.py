from fleet.picker import Routing
from labs.benchmarks.routing import DEVICE, POLICY
from labs.benchmarks.simulated_fleet import SimulatedFleet, digests_of
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content

UNIT = 512


def turn(session: int, number: int, time: float) -> Arrival:
    """A turn of a conversation, which begins with all before it."""
    ids = tuple(session * 100 + unit for unit in range(number + 2))
    prompt = UNIT * (number + 2)
    return Arrival(time, prompt, 5, session, "t", key=f"{session}.{number}", content=Content(ids, UNIT, prompt))


def test_turns_of_a_conversation_go_where_the_one_before_is_cached() -> None:
    arrivals = [turn(session, number, number * 10.0 + session * 0.3) for number in range(3) for session in range(8)]
    routed = SimulatedFleet(3, Routing.PREDICTED, POLICY, DEVICE, seed=1).run(arrivals)
    assert [one.arrival for one in routed] == arrivals and all(0 < one.seconds < 1 for one in routed)
    places = {one.arrival.session: one.view for one in routed[:8]}
    assert len(set(places.values())) == 3
    for one in routed[8:]:
        assert one.view is places[one.arrival.session] and one.cached == one.arrival.prompt_tokens - UNIT
    again = SimulatedFleet(3, Routing.PREDICTED, POLICY, DEVICE, seed=1).run(arrivals)
    assert [one.first for one in again] == [one.first for one in routed]


def test_prompts_share_digests_as_far_as_they_begin_alike() -> None:
    first, second, other = (digests_of(one) for one in (turn(1, 0, 0.0), turn(1, 1, 9.0), turn(2, 1, 9.0)))
    assert second[: len(first)] == first and not set(second) & set(other)
    alone = Arrival(0.0, UNIT, 1, tenant="t", key="7")
    assert len(digests_of(alone)) == UNIT // 128 and not set(digests_of(alone)) & set(
        digests_of(alone._replace(key="8"))
    )
