from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.sequence import Sequence
from tests.backend.scheduler.bench import Bench, make_config
from tests.examples import examples

PROMPTS = [list(range(10, 22)), list(range(10, 18)) + [40] * 6, [50] * 9]
ASK = st.tuples(st.sampled_from("abc"), st.sampled_from(PROMPTS), st.integers(1, 9), st.integers(0, 3))


def unused_slots(sequence: Sequence) -> int:
    return len(sequence.block_table) * make_config().block_size - sequence.num_computed_tokens


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(ASK, max_size=12), st.integers(0, 4), st.integers(0, 5))
def test_every_block_is_on_an_account(asks: list[tuple[str, list[int], int, int]], floor: int, hosted: int) -> None:
    """Held, idle and free blocks are all that there are; what tenants hold is more only by what they share."""
    bench = Bench(num_host_blocks=hosted)
    scheduler = bench.scheduler
    scheduler.kv_manager.cache.limit("a", floor, None)
    accounts = KVAccounts(scheduler.kv_manager)
    for tenant, prompt, max_tokens, steps in asks:
        bench.say(prompt, max_tokens, tenant, salt="all")
        for _ in range(steps):
            if bench.plan() is not None:
                bench.complete()
            assert accounts.num_held + accounts.num_idle + scheduler.pool.num_free == bench.config.num_blocks
            assert accounts.num_held <= accounts.held().total() <= accounts.num_held + 2 * accounts.num_shared
            assert accounts.idle().total() == accounts.num_idle
            assert accounts.kept().total() == accounts.num_kept == min(floor, accounts.idle()["a"])
            assert accounts.charged() == accounts.held() + Counter(a=accounts.num_kept)
            assert accounts.swapped().total() == accounts.num_swapped <= accounts.num_host_blocks == hosted
            assert accounts.unused_slots().total() == sum(map(unused_slots, scheduler.running.values()))
