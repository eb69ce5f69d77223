from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.connection_table import (
    STRANGERS_DIVISOR,
    ConnectionEntry,
    ConnectionLimitReached,
    ConnectionState,
    ConnectionTable,
)

STRANGER, IDLE, UPLOADING, SERVING = ConnectionState


class Crowd:
    def __init__(self, limit: int, limit_per_peer: int | None = None) -> None:
        self.table = ConnectionTable(limit, limit_per_peer)
        self.entries: dict[str, ConnectionEntry] = {}
        self.gone: list[str] = []

    def enter(self, *names: str, address: str = "192.0.2.1", tenant: str = "", state: int = IDLE) -> None:
        for name in names:
            entry = self.entries[name] = self.table.add(address, lambda name=name: self.gone.append(name))
            if tenant:
                entry.begin_request()
                if state is not UPLOADING:
                    entry.complete_request()
                entry.show_key(tenant)
                if state is IDLE:
                    entry.complete_response()

    @property
    def size(self) -> int:
        return sum(map(self.table.num, ConnectionState))


def test_strangers_keep_a_quarter_at_the_cost_of_the_longest_idle_connection() -> None:
    crowd = Crowd(8, 8)
    crowd.enter("first", "second", "third", tenant="acme")
    crowd.enter("busy", "sending", "large", tenant="acme", state=SERVING)
    crowd.entries["first"].begin_request()
    crowd.entries["first"].complete_request()
    crowd.entries["first"].show_key("acme")
    crowd.entries["first"].complete_response()  # it has waited for less time than the others
    crowd.enter("a", "b", "c", "d", "e", "f", "g")
    assert crowd.gone == ["second", "a", "b", "c", "d"]


def test_uploads_make_room_where_their_tenant_has_more_than_half_of_all() -> None:
    crowd = Crowd(4, 4)
    crowd.enter("small", tenant="small", state=UPLOADING)
    crowd.enter("x", "y", "z", tenant="large", state=UPLOADING)
    crowd.enter("newcomer", tenant="small", state=UPLOADING)
    assert crowd.gone == ["x"]
    with pytest.raises(ConnectionLimitReached):
        crowd.enter("another")


def test_a_request_whose_refusal_is_delayed_makes_room_and_waits_for_its_next_one_afterwards() -> None:
    crowd = Crowd(4, 4)
    crowd.enter("a", "b", "c", "d", tenant="acme", state=SERVING)
    crowd.entries["b"].yield_place()
    crowd.entries["c"].yield_place()
    crowd.enter("newcomer", tenant="acme", state=SERVING)
    assert crowd.gone == ["b"]
    crowd.entries["c"].complete_response()
    assert [crowd.table.num(state) for state in (STRANGER, IDLE, SERVING)] == [0, 1, 3]


def test_a_stranger_whose_refusal_is_delayed_goes_before_those_that_came_later() -> None:
    crowd = Crowd(4, 4)
    crowd.enter("a", "b", "c", "d")
    crowd.entries["a"].yield_place()
    crowd.enter("newcomer")
    assert crowd.gone == ["a"]


def test_a_request_that_is_there_is_never_given_up() -> None:
    crowd = Crowd(2, 2)
    crowd.enter("a", "b", tenant="acme", state=SERVING)
    with pytest.raises(ConnectionLimitReached, match=r"has its limit of 2 connections, all of them in use\."):
        crowd.enter("c")
    assert not crowd.table.evict()
    assert (crowd.gone, crowd.table.num_refused) == ([], 1)
    crowd.entries["a"].complete_response()
    crowd.enter("d")
    assert crowd.gone == ["a"]


def test_one_address_makes_room_among_its_own() -> None:
    crowd = Crowd(8, 2)
    crowd.enter("other", address="198.51.100.7")
    crowd.enter("a", "b", "c")
    assert crowd.gone == ["a"]
    with pytest.raises(ConnectionLimitReached, match=r"198\.51\.100\.7"):
        crowd.enter("d", "e", "f", address="198.51.100.7", tenant="acme", state=SERVING)
    assert crowd.gone == ["a", "other"]


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("2001:db8::1", "2001:db8::2:3:4:5", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_an_owner_of_addresses_is_one_peer(one: str, other: str, are_one: bool) -> None:
    crowd = Crowd(8, 1)
    crowd.enter("one", address=one)
    crowd.enter("other", address=other)
    assert crowd.gone == ["one"] * are_one


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_this_machine_may_have_all_places_unless_it_is_limited(address: str) -> None:
    for limit, most in ((None, 8), (3, 3)):
        crowd = Crowd(8, limit)
        crowd.enter(*map(str, range(20)), address=address)
        assert crowd.size == most


def test_addresses_that_were_here_once_are_forgotten() -> None:
    crowd = Crowd(4)
    for number in range(1000):
        crowd.enter(str(number), address=f"10.0.{number // 256}.{number % 256}")
    assert len(crowd.table._peers) < 20


_names = count()
_steps = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(["192.0.2.1", "192.0.2.2", "127.0.0.1"])),
    st.tuples(
        st.sampled_from(["begin_request", "complete_request", "complete_response", "remove"]), st.integers(0, 30)
    ),
    st.tuples(st.sampled_from(["acme", "beta"]), st.integers(0, 30)),
)


@given(st.lists(_steps, max_size=120), st.integers(1, 9))
def test_in_every_history_limits_hold_and_no_protected_connection_is_cut_off(
    steps: list[tuple[str, str | int]], limit: int
) -> None:
    crowd = Crowd(limit)
    addresses: dict[str, str] = {}
    for what, whom in steps:
        states = {name: entry.state for name, entry in crowd.entries.items()}
        num_gone = len(crowd.gone)
        if what == "enter":
            name = str(next(_names))
            try:
                crowd.enter(name, address=str(whom))
                addresses[name] = str(whom)
            except ConnectionLimitReached:
                peers = {states[name] for name in states if addresses[name] == whom}
                assert any(found <= {SERVING, UPLOADING} for found in (peers, {*states.values()}))
        elif crowd.entries:
            entry = list(crowd.entries.values())[int(whom) % len(crowd.entries)]
            if what in ("acme", "beta"):
                entry.show_key(what)
            else:
                getattr(entry, what)()
        for name in crowd.gone[num_gone:]:
            assert states[name] is not SERVING
            if states[name] is not STRANGER:
                strangers = [other for other in states if states[other] is STRANGER]
                neighbours = [other for other in strangers if addresses[other] == addresses[name]]
                assert len(strangers) * STRANGERS_DIVISOR <= limit or len(neighbours) * STRANGERS_DIVISOR <= limit // 2
        for name in [name for name, entry in crowd.entries.items() if not entry._groups]:
            del crowd.entries[name]
        assert crowd.size == len(crowd.entries) <= limit
        held = Counter(addresses[name] for name in crowd.entries)
        assert all(held[peer] <= max(1, limit // 2) for peer in ("192.0.2.1", "192.0.2.2"))
