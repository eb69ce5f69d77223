from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.sequence import FinishReason, Sequence
from tests.backend.scheduler.bench import Bench, make_config
from tests.examples import examples

PROMPTS = [list(range(10, 22)), list(range(10, 18)) + [40] * 6, [50] * 9]
ASK = st.tuples(st.sampled_from("abc"), st.sampled_from(PROMPTS), st.integers(1, 9), st.integers(0, 3))


def unused_slots(sequence: Sequence) -> int:
    return len(sequence.block_table.blocks) * make_config().block_size - sequence.num_computed_tokens


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(ASK, max_size=12), st.integers(0, 4), st.integers(0, 5))
def test_every_block_is_on_an_account(asks: list[tuple[str, list[int], int, int]], floor: int, hosted: int) -> None:
    """Held, idle and free blocks are all that there are; what tenants hold is more only by what they share."""
    bench = Bench(num_host_blocks=hosted)
    scheduler = bench.scheduler
    scheduler.kv_manager.cache.limit("a", floor, None)
    bench.pin_prefixes("b", PROMPTS[0], salt="all")
    bench.pin_prefixes("c", PROMPTS[0][:4], PROMPTS[2], salt="all")
    accounts = KVAccounts(scheduler.kv_manager)
    for tenant, prompt, max_tokens, steps in asks:
        bench.say(prompt, max_tokens, tenant, salt="all")
        for _ in range(steps):
            if bench.plan() is not None:
                bench.complete()
            assert (
                accounts.num_held + accounts.cache.num_idle + scheduler.kv_manager.pool.num_free
                == bench.config.num_blocks
            )
            num_shared = scheduler.kv_manager.blocks.holdings.num_shared
            assert accounts.num_held <= accounts.held().total() <= accounts.num_held + 2 * num_shared
            assert accounts.cache.idle_by_tenant().total() + accounts.cache.num_pinned == accounts.cache.num_idle
            assert (
                accounts.cache.kept_by_tenant().total()
                == accounts.cache.num_floored
                == min(floor, accounts.cache.idle_by_tenant()["a"])
            )
            pinned = accounts.pinned()
            assert accounts.cache.num_pinned <= pinned.total() and pinned["b"] <= 3 and pinned["c"] <= 3
            assert accounts.charged() == accounts.held() + Counter(a=accounts.cache.num_floored) + pinned
            assert accounts.host.held.total() == accounts.host.num_used <= accounts.host.num_blocks == hosted
            assert accounts.unused_slots().total() == sum(map(unused_slots, scheduler.running.values()))


EVENT = st.one_of(
    st.tuples(st.just("say"), st.sampled_from("abc"), st.sampled_from(PROMPTS), st.integers(1, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("limit"), st.sampled_from("abc"), st.integers(0, 4), st.none() | st.integers(4, 5)),
    st.tuples(st.just("pin"), st.sampled_from("abc"), st.lists(st.sampled_from(PROMPTS), max_size=2)),
    st.tuples(st.just("allow"), st.sampled_from("abc"), st.none() | st.integers(0, 12)),
    st.just(("plan",)),
    st.tuples(st.just("step"), st.sampled_from(("complete", "complete", "lose"))),
)


def happen(bench: Bench, sequences: list[Sequence], event: Any, now: float) -> None:
    match event:
        case "say", tenant, prompt, max_tokens:
            sequences.append(bench.say(prompt, max_tokens, tenant, salt="all"))
        case "cancel", number:
            for sequence in sequences[number : number + 1]:
                bench.scheduler.finish_sequence(sequence, FinishReason.CANCELLED, now)
        case "limit", tenant, floor, ceiling:
            bench.scheduler.kv_manager.limit_cache(tenant, floor, ceiling, now)
        case "pin", tenant, prompts:
            bench.pin_prefixes(tenant, *prompts, salt="all", now=now)
        case "allow", tenant, blocks:
            bench.scheduler.allow(tenant, blocks, now)
        case ("plan",):
            bench.plan(now)
        case "step", end:
            if bench.in_flight:
                getattr(bench, end)(now)


@settings(max_examples=examples(75), deadline=None)
@given(st.lists(st.tuples(EVENT, st.integers(1, 8)), max_size=50))
def test_every_tenant_pays_for_what_it_was_charged_as_long_as_it_was(events: list[tuple[Any, int]]) -> None:
    """Block-seconds of its sequences, and of its floor and pins, add up to what it was charged between all events."""
    bench = Bench(num_blocks=24)
    accounts, sequences, now = KVAccounts(bench.scheduler.kv_manager), list[Sequence](), 0.0
    charged: Counter[str] = Counter()
    for event, seconds in events:
        for tenant, blocks in accounts.charged().items():
            charged[tenant] += blocks * seconds
        now += seconds
        happen(bench, sequences, event, now)
        bench.scheduler.check_integrity()
    paid = Counter(accounts.cache.kept.all_block_seconds(now))
    for sequence in sequences:
        paid[sequence.tenant] += sequence.block_seconds(now)
    assert +paid == +charged
