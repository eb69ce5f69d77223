"""Which of a tenant's idle blocks goes first is a matter of worth; who gives way is not."""

from collections import Counter
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from admission.kv.retention import MeasuredRetention
from backend.paged_kv.block_names import BlockName
from backend.paged_kv.block_pool import PagedPool
from backend.paged_kv.block_table import BlockTable
from backend.paged_kv.idle_blocks import PLAIN_CHAIN, IdleBlocks, IdleChain
from backend.paged_kv.prefix_cache import PrefixCache
from tests.backend.paged_kv.test_prefix_cache import finish
from tests.backend.scheduler.bench import Bench


class One:
    """A block."""

    def __init__(self, block: int) -> None:
        self.block, self.is_common = block, False
        self.chain: IdleChain | None = None


def chain(since: int, kind: int = PLAIN_CHAIN) -> IdleChain:
    return IdleChain("t", kind, None, float(since), since)


def left(idle: IdleBlocks[One], since: int, blocks: range, kind: int = PLAIN_CHAIN) -> list[One]:
    """Blocks that are left together, the last of a prompt first."""
    ones = [One(block) for block in blocks]
    idle.add(ones, chain(since, kind))
    return ones


def numbers(blocks: list[One]) -> list[int]:
    return [one.block for one in blocks]


def test_without_worth_the_least_recent_goes_first_and_the_last_block_before_those_it_follows_on() -> None:
    idle = IdleBlocks[One](None)
    old, _ = left(idle, 1, range(3)), left(idle, 2, range(10, 13))
    idle.take(old[0])
    assert numbers(idle.give_up(3, 0)) == [1, 2, 10] and len(idle) == 2


def test_the_chain_of_least_worth_goes_first_to_its_end_and_not_more_than_a_neighbour_is_older() -> None:
    worth = {1: 5.0, 2: 1.0, 3: 3.0}
    idle = IdleBlocks[One](lambda kind, one: worth[one.stamp])
    for since in worth:
        left(idle, since, range(10 * since, 10 * since + 3), kind=since)
    assert numbers(idle.give_up(2, 0)) == [20, 21]
    worth[1] = 0.0
    assert numbers(idle.give_up(2, 0)) == [22, 10], "what was begun is given up to its end"
    assert idle.oldest == 2, "the oldest four stamps are gone, whichever blocks went"
    assert numbers(idle.give_up(9, 2)) == [11, 12], "no more than there are stamps that are as old"


def test_a_shared_prefix_is_kept_while_any_chain_that_follows_it_is() -> None:
    idle = IdleBlocks[One](lambda kind, one: 100.0 - one.stamp)
    first = left(idle, 1, range(4))  # of which 2 and 3 are found by another
    for one in first[2:]:
        idle.take(one)
    idle.add([One(8), One(9), *first[2:]], chain(2))
    assert [one.is_common for one in first] == [False, False, True, True]
    assert numbers(idle.give_up(4, 0)) == [8, 9, 0, 1], "the later one was worth less, and both were worth less"
    assert numbers(idle.give_up(2, 0)) == [2, 3]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("leave"), st.sampled_from("ab"), st.integers(1, 5), st.integers(0, 3)),
        st.tuples(st.just("evict"), st.integers(1, 9)),
        st.tuples(st.just("limit"), st.sampled_from("ab"), st.integers(0, 4)),
    ),
    max_size=40,
)


@given(actions, st.randoms(use_true_random=False))
def test_how_many_blocks_a_tenant_gives_up_does_not_depend_on_what_they_are_worth(did: list[Any], random: Any) -> None:
    """A tenant whose clients claim anything of its blocks takes nothing from others, and loses nothing to them."""

    pools = [PagedPool(400), PagedPool(400)]
    caches = [PrefixCache(pools[0]), PrefixCache(pools[1], lambda kind, chain, age: random.random())]
    ordinals = count()
    for kind, *said in did:
        for cache, pool in zip(caches, pools, strict=True):
            if kind == "leave":
                holder, blocks = BlockTable("", said[0]), pool.allocate(said[1]) or []
                cache.begin_chain(holder.tenant, 0.0).kind = said[2]
                for block in blocks:
                    cache.publish(BlockName(next(ordinals)), block, -1, holder)
                cache.retire([one for block in blocks if (one := cache.at(block))], holder.tenant)
            elif kind == "evict":
                cache.evict(said[0])
            else:
                cache.limit(said[0], said[1], said[1] + 8)
            cache.check_blocks([])
        assert caches[0].idle_by_tenant() == caches[1].idle_by_tenant()
        assert caches[0].evictions == caches[1].evictions
    assert sum(map(Counter.total, (cache.idle_by_tenant() for cache in caches))) == 2 * caches[0].num_idle


def cached_tokens(retention: MeasuredRetention | None, seconds: tuple[float, float]) -> list[int]:
    """What two conversations find at their next turns, whose clients said when these come, after others needed room."""
    bench = Bench(retention, num_blocks=14, max_num_seqs=1)
    turns = []
    for n, expected in enumerate(seconds):
        turn = bench.say(list(range(100 * n, 100 * n + 21)), 3, expects_followup=expected)
        finish(bench, turn)
        turns.append(turn)
        bench.now += 1.0
    finish(bench, bench.say(list(range(900, 925)), 3))
    following = [bench.say([*turn.request.prompt, *turn.output, 7], 2) for turn in turns]
    return [bench.scheduler.num_cached_tokens(turn) for turn in following]


def test_of_two_turns_the_one_that_comes_back_later_gives_way() -> None:
    assert cached_tokens(None, (5.0, 50.0)) == [8, 20]
    assert cached_tokens(MeasuredRetention(), (5.0, 50.0)) == [20, 8]
    assert cached_tokens(MeasuredRetention(), (50.0, 5.0)) == [8, 20]
