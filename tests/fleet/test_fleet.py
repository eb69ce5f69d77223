"""The set of replicas on a virtual clock."""

from contextlib import ExitStack
from dataclasses import replace
from random import Random

import pytest

from fleet.fleet import Fleet
from fleet.picker import Knowledge, LeastPredicted
from fleet.prediction import RoutedRequest
from fleet.prefix_map import PrefixMap
from fleet.view import SILENCE_SECONDS
from gateway.replica.digests import BLOCK_BYTES
from gateway.replica.state import Changes
from tests.fleet.states import IDLE, replica
from tests.gateway.admin.clock import Clock

ASK = RoutedRequest("t", 8000, (b"1", b"2"))


class Three(Fleet):
    """Replicas a, b and c, of which a is the best."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.prefixes = PrefixMap()
        knowledge = Knowledge(self.prefixes, lambda tenant: 1.0)
        super().__init__(LeastPredicted(knowledge, Random(1)), knowledge, self.clock)
        self.set_replicas(map(replica, "abc"))
        self.tell("abc")

    def tell(self, names: str, draining: bool = False, instance: str = "1") -> None:
        for name in names:
            state = replace(IDLE, instance=instance, draining=draining, step_seconds=float("abc".index(name)))
            self.told(self.views[f"{name}:8000"], state, self.clock())

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @property
    def names(self) -> str:
        return "".join(view.name[0] for view in self.available())

    def fail(self, name: str, times: int = 2) -> None:
        for _ in range(times):
            self.failed(self.views[f"{name}:8000"], is_unreachable=False)

    def cached(self, name: str) -> int:
        return self.prefixes.cached_bytes(f"{name}:8000", ASK.digests, self.clock()) // BLOCK_BYTES


@pytest.fixture
def three() -> Three:
    return Three()


def test_a_silent_replica_is_left_out_until_it_tells_its_state(three: Three) -> None:
    three.pass_time(SILENCE_SECONDS)
    three.tell("ab")
    assert three.names == "ab"
    three.silent(three.views["c:8000"])
    assert three.views["c:8000"].state is None
    three.tell("c")
    assert three.names == "abc"


def test_where_all_are_silent_it_is_the_router_that_is_late(three: Three) -> None:
    three.pass_time(10 * SILENCE_SECONDS)
    for view in three.views.values():
        three.silent(view)
    assert three.names == "abc"


def test_a_replica_that_drains_or_cannot_be_reached_is_left_out_at_once(three: Three) -> None:
    three.tell("a", draining=True)
    assert three.names == "bc"
    three.failed(three.views["b:8000"], is_unreachable=True)
    assert three.names == "c"
    three.tell("c", draining=True)
    assert three.pick(ASK) is None


def test_failures_leave_it_out_for_a_while_unless_most_fail(three: Three) -> None:
    three.fail("a")
    assert three.names == "bc"
    three.fail("b")
    assert three.names == "abc"
    three.pass_time(1.0)
    three.tell("abc")
    three.fail("a", times=1)
    assert three.names == "bc"


def test_known_prefixes_are_forgotten_at_a_restart_a_loss_and_a_change_of_the_file(three: Three) -> None:
    for name in "abc":
        three.answered(ASK, three.views[f"{name}:8000"])
    assert [three.cached(name) for name in "abc"] == [2, 2, 2]
    three.tell("a", instance="2")
    three.lost(three.views["b:8000"])
    three.set_replicas(map(replica, "ab"))
    assert [three.cached(name) for name in "abc"] == [0, 0, 0]


def test_a_replica_tells_what_it_has_cached_and_given_up(three: Three) -> None:
    view, digests = three.views["a:8000"], [one.hex() for one in ASK.digests]

    def tell(changes: Changes) -> int:
        three.told(view, replace(IDLE, beginnings=changes), three.clock())
        assert view.next_event == changes.next
        return three.cached("a")

    assert tell(Changes(2, digests, [], is_all=True)) == 2
    assert tell(Changes(2, [], [], is_all=False)) == 2
    assert tell(Changes(3, [], digests[1:], is_all=False)) == 1
    assert tell(Changes(9, digests[1:], [], is_all=True)) == 0, "the first is not among all that there are"
    assert tell(Changes(9, digests[:1], [], is_all=False)) == 2
    assert tell(Changes(9, digests[1:], [], is_all=False, behind={digests[1]: 3 * BLOCK_BYTES})) == 5
    three.answered(ASK, view)
    assert three.cached("a") == 5, "what is behind it is as it was"
    assert tell(Changes(9, digests[1:], [], is_all=False)) == 2
    three.lost(view)
    assert view.next_event == 0


def test_a_change_of_the_file_keeps_the_knowledge_of_staying_replicas(three: Three) -> None:
    before = three.views["a:8000"]
    with three.attempt(ASK, three.views["c:8000"]):
        three.set_replicas(map(replica, "ad"))
        assert three.views["a:8000"] is before
        assert three.names == "a", "d has told nothing yet"
    assert three.num_attempts == 1


def test_requests_on_their_way_count_before_the_replica_tells_of_them(three: Three) -> None:
    for view in three.views.values():
        three.told(view, IDLE, three.clock())
    with ExitStack() as sent:
        for _ in range(9):
            view = three.pick(ASK)
            assert view is not None
            sent.enter_context(three.attempt(ASK, view))
        assert sorted(view.load for view in three.views.values()) == [3, 3, 3]
    assert sorted(view.load for view in three.views.values()) == [0, 0, 0]
