from hypothesis import given
from hypothesis import strategies as st

from fleet.prefix_map import LIFETIME_SECONDS, PrefixMap
from gateway.replica.digests import BLOCK_BYTES

CHAIN = (b"1", b"2", b"3")


def test_leading_digests_count_until_the_first_that_is_not_there() -> None:
    prefixes = PrefixMap()
    prefixes.learn("a", CHAIN, 0.0)
    assert prefixes.cached_bytes("a", CHAIN, 1.0) == 3 * BLOCK_BYTES
    assert prefixes.cached_bytes("a", (b"1", b"9", b"3"), 1.0) == BLOCK_BYTES
    assert prefixes.cached_bytes("b", CHAIN, 1.0) == 0


def test_it_is_forgotten_at_eviction_restart_and_with_time() -> None:
    prefixes = PrefixMap()
    prefixes.learn("a", CHAIN, 0.0)
    prefixes.learn("b", CHAIN, 0.0)
    prefixes.evicted("a", (b"2",))
    assert prefixes.cached_bytes("a", CHAIN, 1.0) == BLOCK_BYTES
    prefixes.forget("a")
    assert prefixes.cached_bytes("a", CHAIN, 1.0) == 0
    assert prefixes.cached_bytes("b", CHAIN, 1.0) == 3 * BLOCK_BYTES
    prefixes.learn("a", CHAIN[:1], 1.0)
    assert prefixes.cached_bytes("a", CHAIN, LIFETIME_SECONDS + 0.5) == BLOCK_BYTES
    assert prefixes.cached_bytes("b", CHAIN, LIFETIME_SECONDS + 0.5) == 0


def test_only_the_rest_behind_the_last_known_digest_counts() -> None:
    prefixes = PrefixMap()
    prefixes.learn("a", CHAIN, 0.0, {b"2": 100, b"3": 700})
    assert prefixes.cached_bytes("a", CHAIN, 1.0) == 3 * BLOCK_BYTES + 700
    assert prefixes.cached_bytes("a", (*CHAIN, b"4"), 1.0) == 3 * BLOCK_BYTES + 700
    assert prefixes.cached_bytes("a", (b"1", b"2", b"9"), 1.0) == 2 * BLOCK_BYTES + 100
    prefixes.learn("a", CHAIN, 1.0)
    assert prefixes.cached_bytes("a", CHAIN, 1.0) == 3 * BLOCK_BYTES + 700
    prefixes.learn("a", (b"3",), 1.0, {})
    assert prefixes.cached_bytes("a", CHAIN, 1.0) == 3 * BLOCK_BYTES
    prefixes.learn("a", (b"3",), 1.0, {b"3": 5})
    prefixes.forget("a")
    prefixes.learn("a", CHAIN, 2.0)
    assert prefixes.cached_bytes("a", CHAIN, 2.0) == 3 * BLOCK_BYTES


@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(min_size=1, max_size=1)), max_size=60))
def test_it_is_bounded_and_keeps_what_was_asked_for_last(learned: list[tuple[str, bytes]]) -> None:
    prefixes = PrefixMap(most=10)
    for moment, (name, digest) in enumerate(learned):
        prefixes.learn(name, (digest,), float(moment))
        assert prefixes.cached_bytes(name, (digest,), float(moment)) == BLOCK_BYTES
        assert len(prefixes) <= 10
