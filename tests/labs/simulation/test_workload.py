from collections import Counter

import pytest

from labs.simulation.arrival import Arrival
from labs.simulation.errors import OptionError
from labs.simulation.workload import Flood, Workload

TRACE = tuple(Arrival(float(n), 10 + n, 5, session=n % 7) for n in range(200))


def test_a_speedup_divides_times_and_a_rate_replaces_them() -> None:
    assert Workload(TRACE, speedup=4.0).arrivals(1)[100].time == 25.0
    poisson = Workload(TRACE, requests=5000, rate=10.0).arrivals(1)
    assert poisson[-1].time == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("speedup", [1e-308, 1e300, float("inf"), 0.0])
def test_a_pace_at_which_no_clock_can_tell_the_time_is_refused(speedup: float) -> None:
    with pytest.raises(OptionError, match="--speedup"):
        Workload(TRACE, speedup=speedup)


def test_more_requests_than_the_trace_has_repeat_it_in_time() -> None:
    arrivals = Workload(TRACE, requests=500).arrivals(1)
    times = [arrival.time for arrival in arrivals]
    assert len(arrivals) == 500 and times == sorted(times)
    assert arrivals[200].prompt_tokens == TRACE[0].prompt_tokens and arrivals[200].time == pytest.approx(200)


def test_requests_of_one_coarse_timestamp_spread_until_the_next() -> None:
    trace = (*(Arrival(0.0, n, 1) for n in range(1, 9)), Arrival(4.0, 9, 1))
    times = [arrival.time for arrival in Workload(trace).arrivals(1)]
    assert len(set(times)) == 9 and times == sorted(times) and max(times[:-1]) < 4.0


def test_tenants_take_their_shares() -> None:
    arrivals = Workload(TRACE, requests=4000, tenants="heavy:0.8,light:0.2", classes="0:1,2:3").arrivals(1)
    assert Counter(a.tenant for a in arrivals)["heavy"] / 4000 == pytest.approx(0.8, abs=0.03)
    assert Counter(a.priority_class for a in arrivals)[2] / 4000 == pytest.approx(0.75, abs=0.03)


def test_tenants_by_hash_are_the_same_for_every_seed_and_for_all_of_a_session() -> None:
    first, second = (Workload(TRACE, tenants="hash:4").arrivals(seed) for seed in (1, 2))
    assert [a.tenant for a in first] == [a.tenant for a in second]
    assert len({(a.session, a.tenant) for a in first}) == 7


def test_a_flood_adds_its_rate_for_its_time() -> None:
    arrivals = Workload(TRACE, tenants="app:1", floods=(Flood.parse("noisy:20@60+30"),)).arrivals(1)
    noisy = [a for a in arrivals if a.tenant == "noisy"]
    assert len(noisy) == pytest.approx(600, rel=0.15) and all(60 <= a.time < 90 for a in noisy)
    assert [a.time for a in arrivals] == sorted(a.time for a in arrivals)


@pytest.mark.parametrize("rule", ["0", "a:0.5,b", "a:-1", "a:1,a:2", "hash:0", ":1", "a:nan"])
def test_a_rule_that_makes_no_sense_is_refused_by_name(rule: str) -> None:
    with pytest.raises(OptionError, match="--tenants"):
        Workload(TRACE, tenants=rule)


def test_a_class_that_no_request_can_have_is_refused() -> None:
    with pytest.raises(OptionError, match="--classes: classes are numbers up to 16"):
        Workload(TRACE, classes="0:1,17:1")


@pytest.mark.parametrize("text", ["noisy", "noisy:20", "noisy:0@1+1", "noisy:1@2+x", "noisy:1.2.3@1+1"])
def test_a_flood_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--flood"):
        Flood.parse(text)


def test_a_scheduler_is_never_told_the_length_of_an_answer_as_what_was_declared() -> None:
    trace = tuple(Arrival(float(n), 10, 1 + n % 900) for n in range(1000))
    assert {arrival.max_tokens for arrival in Workload(trace).arrivals(1)} == {1024}
    longer = (*trace, Arrival(1000.0, 10, 1025))
    assert {arrival.max_tokens for arrival in Workload(longer).arrivals(1)} == {2048}
    assert Workload(longer).assumed == 2048


def test_declared_tokens_come_from_the_trace_or_the_command_line() -> None:
    trace = (Arrival(0.0, 10, 5, max_tokens=7), Arrival(1.0, 10, 5), Arrival(2.0, 10, 600))
    assert [a.max_tokens for a in Workload(trace).arrivals(1)] == [7, 1024, 1024]
    assert [a.max_tokens for a in Workload(trace, max_tokens=50).arrivals(1)] == [50, 50, 1024]
    assert Workload(trace, max_tokens=50).assumed is None and Workload(trace[:1]).assumed is None


def test_an_assumed_declaration_leaves_room_for_the_prompt() -> None:
    trace = (Arrival(0.0, 100, 5), Arrival(1.0, 1000, 100))
    assert [a.max_tokens for a in Workload(trace, context=1100).arrivals(1)] == [1000, 100]
