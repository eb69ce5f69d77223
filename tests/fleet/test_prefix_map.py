from hypothesis import given
from hypothesis import strategies as st

from fleet.prefix_map import LIFETIME, PrefixMap

CHAIN = (b"1", b"2", b"3")


def test_leading_digests_count_until_the_first_that_is_not_there() -> None:
    prefixes = PrefixMap()
    prefixes.learn("a", CHAIN, 0.0)
    assert prefixes.num_cached("a", CHAIN, 1.0) == 3
    assert prefixes.num_cached("a", (b"1", b"9", b"3"), 1.0) == 1
    assert prefixes.num_cached("b", CHAIN, 1.0) == 0


def test_it_is_forgotten_at_eviction_restart_and_with_time() -> None:
    prefixes = PrefixMap()
    prefixes.learn("a", CHAIN, 0.0)
    prefixes.learn("b", CHAIN, 0.0)
    prefixes.evicted("a", (b"2",))
    assert prefixes.num_cached("a", CHAIN, 1.0) == 1
    prefixes.forget("a")
    assert prefixes.num_cached("a", CHAIN, 1.0) == 0
    assert prefixes.num_cached("b", CHAIN, 1.0) == 3
    prefixes.learn("a", CHAIN[:1], 1.0)
    assert prefixes.num_cached("a", CHAIN, LIFETIME + 0.5) == 1
    assert prefixes.num_cached("b", CHAIN, LIFETIME + 0.5) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(min_size=1, max_size=1)), max_size=60))
def test_it_is_bounded_and_keeps_what_was_asked_for_last(learned: list[tuple[str, bytes]]) -> None:
    prefixes = PrefixMap(most=10)
    for moment, (name, digest) in enumerate(learned):
        prefixes.learn(name, (digest,), float(moment))
        assert prefixes.num_cached(name, (digest,), float(moment)) == 1
        assert len(prefixes) <= 10
