from math import ceil

from hypothesis import assume, given
from hypothesis import strategies as st

from fleet.rendezvous import BOUND, choose, ranked

names = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=8, unique=True)
keys = st.binary(min_size=1, max_size=12)


@given(keys, names)
def test_a_key_goes_to_the_same_place_from_everywhere(key: bytes, which: list[str]) -> None:
    assert (
        choose(key, dict.fromkeys(which, 0)) == choose(key, dict.fromkeys(reversed(which), 0)) == ranked(key, which)[0]
    )


@given(keys, names, st.data())
def test_only_what_was_at_a_place_that_is_gone_moves(key: bytes, which: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(which))
    first, *_ = ranked(key, which)
    assume(first != gone)
    assert ranked(key, [name for name in which if name != gone])[0] == first


@given(st.lists(keys, min_size=1, max_size=200), st.integers(1, 6))
def test_no_place_gets_much_more_than_its_share(asked: list[bytes], count: int) -> None:
    loads = {str(number): 0 for number in range(count)}
    for number, key in enumerate(asked):
        loads[choose(key, loads)] += 1
        assert max(loads.values()) <= ceil(BOUND * (number + 1) / count)


def test_keys_spread() -> None:
    first = [ranked(number.to_bytes(4), ["a", "b", "c"])[0] for number in range(3000)]
    assert all(900 < first.count(name) < 1100 for name in "abc")
