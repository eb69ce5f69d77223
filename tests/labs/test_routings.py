from random import Random

import pytest

import labs.routings  # noqa: F401 - adds ways to pick
from fleet.picker import PICKERS, Knowledge, Picker, Routing
from fleet.prefix_map import PrefixMap
from gateway.replica.state import KVTokens
from tests.fleet.states import view
from tests.fleet.test_picker import LONG, SHORT, picks


@pytest.fixture
def knowledge() -> Knowledge:
    return Knowledge(PrefixMap(), lambda tenant: 1.0)


def test_the_baselines(knowledge: Knowledge) -> None:
    def picker(routing: Routing) -> Picker:
        return PICKERS[routing](knowledge, Random(1))

    views = [view("a", running=2), view("b"), view("c", running=1, kv=KVTokens(1000, 100, 0))]
    assert picks(picker(Routing.ROUND_ROBIN), SHORT, views, 6) == {"a": 2, "b": 2, "c": 2}
    assert picks(picker(Routing.LEAST_LOAD), SHORT, views) == {"b": 200}
    assert picks(picker(Routing.WEIGHTED), SHORT, views) == {"b": 200}
    knowledge.prefixes.learn("c:8000", LONG.digests, 0.0)
    knowledge.prefixes.learn("a:8000", LONG.digests, 0.0)
    assert picks(picker(Routing.WEIGHTED), LONG, views) == {"a": 200}
    assert picks(picker(Routing.CACHE_AWARE), LONG, views) == {"a": 200}
    assert picks(picker(Routing.CACHE_AWARE), SHORT, views) == {"a": 200}, "of those with most free memory the first"
    far = [view("a", running=100), view("b", running=20)]
    assert picks(picker(Routing.CACHE_AWARE), LONG, far) == {"b": 200}


def test_every_way_to_pick_that_has_a_name_can_be_chosen() -> None:
    assert PICKERS.keys() == set(Routing)
