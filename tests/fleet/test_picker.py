from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.picker import MAX_PLACED_BEGINNINGS, Knowledge, LeastPredicted, Picker
from fleet.prediction import RoutedRequest
from fleet.prefix_map import PrefixMap
from fleet.view import ReplicaView
from tests.fleet.states import view, work

SHORT = RoutedRequest("t", 100)
LONG = RoutedRequest("t", 8000, tuple(bytes([number]) for number in range(15)))  # 2 s of prompt


@pytest.fixture
def knowledge() -> Knowledge:
    return Knowledge(PrefixMap(), lambda tenant: 1.0)


def predicted(knowledge: Knowledge) -> LeastPredicted:
    return LeastPredicted(knowledge, Random(1))


def picks(picker: Picker, request: RoutedRequest, views: list[ReplicaView], count: int = 200) -> Counter[str]:
    counted = Counter[str]()
    for _ in range(count):
        picked = picker.pick(request, views, 0.0)
        counted[picked.replica.url[7]] += 1
        picker.sent(request, picked, 0.0, 0.0)
    return counted


@given(st.lists(st.floats(0, 50), min_size=1, max_size=6), st.integers(0, 9))
def test_no_request_waits_much_longer_than_at_its_best_replica(backlogs: list[float], seed: int) -> None:
    knowledge = Knowledge(PrefixMap(), lambda tenant: 1.0)
    views = [view(str(number), prefill_seconds=seconds) for number, seconds in enumerate(backlogs)]
    for request in (SHORT, LONG):
        picker = LeastPredicted(knowledge, Random(seed))
        least = min(knowledge.cost(request, one, 0.0, 1) for one in views)
        picked = picker.pick(request, views, 0.0)
        assert knowledge.cost(request, picked, 0.0, 1) <= max(1.1 * least, least + 0.005) + 1e-9


def test_a_tenant_goes_where_its_own_backlog_is_short(knowledge: Knowledge) -> None:
    views = [view("a", waiting={"t": work(5.0)}), view("b", waiting={"noisy": work(500.0, 400)})]
    assert picks(predicted(knowledge), SHORT, views) == {"b": 200}


def test_a_prompt_goes_where_it_is_cached_unless_the_wait_is_longer(knowledge: Knowledge) -> None:
    knowledge.prefixes.learn("b:8000", LONG.digests, 0.0)
    waits = [view("a"), view("b", prefill_seconds=1.0)]
    assert picks(predicted(knowledge), LONG, waits) == {"b": 200}
    waits[1] = view("b", prefill_seconds=3.0)
    assert picks(predicted(knowledge), LONG, waits) == {"b": 200}, "to compute it again would delay others by 2 s"
    waits[1] = view("b", prefill_seconds=5.0)
    assert picks(predicted(knowledge), LONG, waits) == {"a": 200}


def test_the_busier_all_are_the_more_counts_what_would_be_computed_twice(knowledge: Knowledge) -> None:
    knowledge.prefixes.learn("b:8000", LONG.digests, 0.0)

    def picked(rate: float, waits: float) -> str:
        """Where the prompt goes after half a minute of `rate` requests a second, while both have a backlog."""
        picker = predicted(knowledge)
        both = [view("a", prefill_seconds=waits), view("b", prefill_seconds=waits + 5.0)]
        for number in range(int(30 * rate)):
            picker.sent(SHORT, both[0], 0.025, number / rate - 30)
        return picker.pick(LONG, both, 0.0).name[0]

    assert picked(rate=0.5, waits=0.0) == "a", "there is room for it"
    assert picked(rate=40.0, waits=0.0) == "a"
    assert picked(rate=0.5, waits=0.5) == "a", "few come in time to be delayed"
    assert picked(rate=40.0, waits=0.5) == "b", "20 are delayed by 2 s each"


def test_beyond_capacity_it_counts_no_more_than_just_below(knowledge: Knowledge) -> None:
    picker, views = predicted(knowledge), [view("a", prefill_seconds=1.0), view("b", prefill_seconds=1.0)]
    for number in range(10_000):
        picker.sent(SHORT, views[0], 2.0, number * 0.02)
    assert picker.num_delayed(views) == pytest.approx(1 + 25 / 0.05, rel=0.05)


def test_prompts_that_begin_alike_meet_and_others_spread(knowledge: Knowledge) -> None:
    views = [view(name) for name in "abc"]
    assert len(picks(predicted(knowledge), LONG, views)) == 1
    spread = picks(predicted(knowledge), SHORT, views)
    assert all(30 < spread[name] < 110 for name in "abc")


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("num_prefixes", [2, 3, 10, 600])
def test_new_beginnings_spread_evenly_over_idle_replicas_and_each_stays_where_it_is(
    knowledge: Knowledge, num_replicas: int, num_prefixes: int
) -> None:
    picker, views = predicted(knowledge), [view(name) for name in "abcde"[:num_replicas]]
    places: dict[int, str] = {}
    for number in range(num_prefixes):
        request = RoutedRequest("t", 8000, tuple(number.to_bytes(2) + bytes([block]) for block in range(15)))
        found = picks(picker, request, views, 4)
        assert len(found) == 1, "also before any replica has told that it has it"
        (places[number],) = found
    counts = Counter(places.values())
    assert len(counts) == min(num_replicas, num_prefixes)
    assert max(counts.values()) - min(counts.values()) <= 2
    assert sum(picker._placed.num_at.values()) == min(num_prefixes, MAX_PLACED_BEGINNINGS)


def test_a_new_beginning_goes_where_fewer_requests_are(knowledge: Knowledge) -> None:
    assert picks(predicted(knowledge), LONG, [view("a", running=3), view("b")], 1) == {"b": 1}


def test_of_two_at_random_the_less_loaded(knowledge: Knowledge) -> None:
    views = [view("a", running=3), view("b"), view("c")]
    assert not picks(predicted(knowledge), SHORT, views)["a"]
