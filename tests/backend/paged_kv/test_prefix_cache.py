"""Sequences that begin alike share blocks, whose content is right after every sequence of events."""

from random import Random
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from admission.kv.retention import MeasuredRetention
from backend.config import EngineConfig
from backend.scheduler.batch import NO_TOKEN, StepOutput
from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from tests.backend.scheduler.bench import Bench, LossyMachine, expected
from tests.examples import examples

EXPECTED = st.sampled_from([None, 0.5, 10.0, 3600.0])  # seconds until the next turn, as a client says
PROMPT = list(range(100, 113))  # three blocks of 4, and a token


def computed(bench: Bench) -> int:
    """The tokens that all steps so far computed of prompts."""
    return sum(sum(batch.lengths[batch.num_decodes :]) for batch in bench.batches)


def finish(bench: Bench, *sequences: Sequence) -> None:
    bench.drain()
    assert [s.output for s in sequences] == [expected(s) for s in sequences]


def test_a_prompt_that_was_computed_is_found() -> None:
    bench = Bench()
    first = bench.say(PROMPT, 4)
    finish(bench, first)
    second = bench.say(PROMPT, 6)
    finish(bench, second)
    assert (first.num_cached_tokens, first.num_billed_tokens) == (0, 13)
    assert (second.num_cached_tokens, second.num_billed_tokens) == (12, 1)
    assert computed(bench) == 14 == bench.scheduler.counters.prompt_tokens


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_next_turn_that_comes_before_the_step_in_flight_has_ended_finds_the_answer_too(is_lost: bool) -> None:
    bench = Bench(max_model_len=64, num_blocks=32, steps_in_flight=2)
    turn = bench.say(PROMPT, 40)  # whose answer ends by itself
    while turn.status is not SequenceStatus.FINISHED:
        bench.step()
    assert bench.in_flight, "a step that still names it"
    following = bench.say([*turn.request.prompt, *turn.output, 7, 8, 9], 4)
    assert bench.scheduler.num_cached_tokens(following) == (13 + len(turn.output)) // 4 * 4
    bench.plan()
    if is_lost:
        bench.lose()
    finish(bench, turn, following)
    assert is_lost or following.num_cached_tokens == (13 + len(turn.output)) // 4 * 4


def test_those_who_wait_for_one_prompt_at_once_compute_it_once() -> None:
    bench = Bench(max_num_batched_tokens=8, prefill_chunk=8)
    crowd = [bench.say([*PROMPT, n], 6) for n in range(4)]
    bench.steps(1)
    assert [s.status for s in crowd] == [SequenceStatus.RUNNING] * 4, "who follows has its slot"
    finish(bench, *crowd)
    assert [s.num_cached_tokens for s in crowd] == [0, 12, 12, 12]
    assert computed(bench) == 14 + 3 * 2


def test_a_follower_computes_the_prompt_when_its_leader_is_cancelled() -> None:
    bench = Bench(max_num_batched_tokens=4, prefill_chunk=4)
    leader, follower = bench.say([*PROMPT, 1], 4), bench.say([*PROMPT, 2], 4)
    bench.plan()
    bench.scheduler.finish_sequence(leader, FinishReason.CANCELLED)
    finish(bench, follower)
    assert follower.num_cached_tokens == 4, "the step that was on its way is used"


def test_a_lost_step_undoes_those_who_depend_on_it() -> None:
    bench = Bench(max_num_batched_tokens=16, prefill_chunk=16)
    leader = bench.say([*PROMPT, 1], 4)
    bench.plan()
    follower = bench.say([*PROMPT, 2], 4)
    bench.plan()
    assert (follower.num_cached_tokens, len(follower.block_table.blocks)) == (12, 4)
    bench.lose()
    assert (follower.num_cached_tokens, follower.num_computed_tokens) == (0, 0)
    finish(bench, leader, follower)
    assert leader.num_billed_tokens + leader.num_cached_tokens == 14
    assert follower.num_billed_tokens + follower.num_cached_tokens == 14


def test_a_preempted_sequence_hits_its_own_blocks() -> None:
    bench = Bench(num_blocks=10)
    sequences = [bench.say([n, *range(20, 25)], 25) for n in range(4)]
    finish(bench, *sequences)
    assert bench.scheduler.counters.preemptions > 0
    lost = sum(s.num_lost_tokens for s in sequences)
    assert bench.scheduler.counters.recomputed_tokens < lost
    assert all(s.num_cached_tokens == 0 for s in sequences), "they had computed it themselves"


def test_a_tenant_is_charged_once_for_what_its_sequences_share() -> None:
    bench = Bench()
    held = bench.scheduler.kv_manager.allowances.held
    finish(bench, bench.say(PROMPT, 4, "a", salt="group"))
    two = [bench.say([*PROMPT, 1], 8, "a", salt="group"), bench.say([*PROMPT, 2], 8, "a", salt="group")]
    other = bench.say([*PROMPT, 3], 8, "b", salt="group")
    bench.steps(2)
    assert [len(s.block_table.blocks) for s in (*two, other)] == [4, 4, 4]
    assert (held["a"], held["b"]) == (5, 4), "three are shared, and one each is its own"
    assert bench.scheduler.kv_manager.blocks.num_available == bench.config.num_blocks - 6
    bench.scheduler.finish_sequence(two[0], FinishReason.CANCELLED)
    bench.steps(2)
    assert (held["a"], two[1].block_table.num_charged) == (len(two[1].block_table.blocks),) * 2, "who is left pays"
    finish(bench, two[1], other)


def test_two_sequences_with_shared_blocks_run_under_a_lease_too_small_for_two_prompts() -> None:
    bench = Bench()
    bench.scheduler.allow("a", 7)
    finish(bench, bench.say(PROMPT, 4, "a"))
    both = [bench.say([*PROMPT, n], 3, "a") for n in range(2)]
    bench.steps(2)
    assert len(bench.scheduler.running) == 2
    finish(bench, *both)


def test_idle_blocks_make_way_the_least_recently_used_first_and_leaves_before_what_they_follow_on() -> None:
    bench = Bench(num_blocks=10)
    old, new = list(range(100, 113)), list(range(200, 213))
    finish(bench, bench.say(old, 3))
    finish(bench, bench.say(new, 3))
    finish(bench, bench.say(old[:5], 3))  # its first block was used last
    finish(bench, bench.say(list(range(300, 316)), 7))
    again = [bench.say([*old], 3), bench.say([*new], 3)]
    finish(bench, *again)
    assert [s.num_cached_tokens for s in again] == [4, 8]


def test_a_floor_keeps_blocks_and_a_ceiling_gives_them_up() -> None:
    bench = Bench(num_blocks=14)
    cache = bench.scheduler.kv_manager.cache
    cache.limit("a", 3, None)
    cache.limit("b", 0, 1)
    finish(bench, bench.say(PROMPT, 3, "a"), bench.say(PROMPT, 3, "b"))
    assert (cache.num_idle_of("a"), cache.num_idle_of("b")) == (3, 1)
    for n in range(6):
        finish(bench, bench.say(list(range(300 + 20 * n, 320 + 20 * n)), 9, "flood"))
    kept = bench.say(PROMPT, 3, "a")
    finish(bench, kept)
    assert kept.num_cached_tokens == 12
    cache.limit("a", 0, None)
    assert cache.num_evictable == cache.num_idle


def test_cached_tokens_are_counted_for_a_waiting_sequence_until_it_runs() -> None:
    bench = Bench(num_blocks=32)
    counted = list(range(200, 209))
    finish(bench, bench.say(counted, 3, "a"))
    waiting = bench.say(counted, 3, "a", is_looked_up=True)
    assert (waiting.num_found_tokens, waiting.num_cached_tokens) == (8, 0)
    finish(bench, waiting)
    assert (waiting.num_found_tokens, waiting.num_cached_tokens) == (0, 8)


def test_nobody_finds_what_a_sequence_computed_that_failed() -> None:
    bench = Bench()
    failed = bench.say(PROMPT, 4)
    while not failed.output and bench.plan():
        batch = bench.in_flight.popleft()
        bench.device.execute(batch)
        bench.scheduler.update_from_output(StepOutput(batch.step, [NO_TOKEN] * len(batch.sampled), 0.0))
        if batch.sampled:
            break
    bench.scheduler.finish_sequence(failed, FinishReason.FAILED)
    bench.scheduler.check_integrity()
    again = bench.say(PROMPT, 4)
    finish(bench, again)
    assert again.num_cached_tokens == 0


def test_an_evicted_block_is_swapped_out_and_hit_again_on_the_host() -> None:
    bench = Bench(num_blocks=10, num_host_blocks=40)
    counters = bench.scheduler.counters
    finish(bench, bench.say(PROMPT, 3))
    for n in range(3):
        finish(bench, bench.say(list(range(300 + 40 * n, 330 + 40 * n)), 7))
    assert counters.swapped_out > 0
    again = bench.say(PROMPT, 4)
    finish(bench, again)
    assert again.num_cached_tokens == 12 and counters.swapped_in == 3


def test_blocks_of_a_preempted_sequence_come_back_from_the_host() -> None:
    bench = Bench(num_blocks=10, num_host_blocks=40)
    sequences = [bench.say([n, *range(20, 25)], 25) for n in range(4)]
    finish(bench, *sequences)
    counters = bench.scheduler.counters
    assert counters.preemptions > 0 and counters.swapped_in > 0
    assert counters.recomputed_tokens <= 4 * counters.preemptions, "no more than what is in no full block"


def test_a_lost_step_takes_its_copies_back() -> None:
    bench = Bench(num_blocks=10, num_host_blocks=40)
    finish(bench, bench.say(PROMPT, 3))
    for n in range(3):
        finish(bench, bench.say(list(range(300 + 40 * n, 330 + 40 * n)), 7))
    again = bench.say(PROMPT, 4)
    bench.plan()
    assert again.num_cached_tokens == 12
    bench.lose()
    assert again.num_cached_tokens == 0
    finish(bench, again)
    assert again.num_cached_tokens == 12


class Unwilling(DefaultHooks):
    """Swaps nothing, and records the probabilities of reuse that it was asked about."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.asked: list[float] = []

    def swaps(self, probability: float, blocks_per_place: int) -> bool:
        self.asked.append(probability)
        return False


def test_a_block_that_is_not_worth_two_copies_is_dropped() -> None:
    bench = Bench(make_hooks=Unwilling, num_blocks=10, num_host_blocks=8)
    asked = cast(Unwilling, bench.hooks).asked
    for n in range(3):
        finish(bench, bench.say(list(range(300 + 40 * n, 330 + 40 * n)), 7))
    assert asked and bench.scheduler.counters.swapped_out == 0
    assert asked == sorted(asked, reverse=True), "nothing of this tenant came back so far"


def test_answers_to_one_prompt_start_from_one_prefill() -> None:
    bench = Bench(max_num_batched_tokens=16, prefill_chunk=16)
    answers = [bench.say(PROMPT, 6, prompt_group="g") for _ in range(4)]
    batch = bench.plan()
    assert batch is not None
    assert (batch.slots, batch.lengths, batch.sampled) == ([0], [13], [0, 0, 0, 0])
    assert [len(set(batch.sampled_slots)), len(batch.block_copies)] == [4, 3]
    assert len({tuple(s.block_table.blocks[:3]) for s in answers}) == 1, "what is full is shared"
    assert len({s.block_table.blocks[3] for s in answers}) == 4, "each writes into a block of its own"
    finish(bench, *answers)
    assert computed(bench) == 13 == bench.scheduler.counters.prompt_tokens
    assert [s.num_cached_tokens for s in answers] == [0, 13, 13, 13]


def test_of_a_prompt_that_fills_its_blocks_nothing_is_copied() -> None:
    bench = Bench(max_num_batched_tokens=16, prefill_chunk=16)
    answers = [bench.say(PROMPT[:12], 6, prompt_group="g") for _ in range(3)]
    batch = bench.plan()
    assert batch is not None and len(batch.sampled) == 3 and not batch.block_copies
    finish(bench, *answers)
    assert computed(bench) == 12


@pytest.mark.parametrize("chunk", [3, 4, 5, 8])
def test_answers_wait_for_the_one_that_computes_their_prompt(chunk: int) -> None:
    bench = Bench(max_num_batched_tokens=8, prefill_chunk=chunk)
    answers = [bench.say(PROMPT, 6, prompt_group="g") for _ in range(4)]
    finish(bench, *answers)
    assert computed(bench) == 13


def test_another_tenant_or_prompt_is_no_fork() -> None:
    bench = Bench(max_num_batched_tokens=32, prefill_chunk=16)
    answers = [bench.say(PROMPT, 4, prompt_group="g"), bench.say(PROMPT, 4, "b", prompt_group="g")]
    answers += [bench.say(PROMPT[:5], 4, prompt_group="g"), bench.say(PROMPT, 4)]
    finish(bench, *answers)
    assert not any(batch.forks for batch in bench.batches)


def test_when_the_one_that_computes_is_cancelled_the_next_does() -> None:
    bench = Bench(max_num_batched_tokens=4, prefill_chunk=4)
    first, *others = [bench.say(PROMPT, 4, prompt_group="g") for _ in range(3)]
    bench.plan()
    bench.scheduler.finish_sequence(first, FinishReason.CANCELLED)
    finish(bench, *others)
    assert computed(bench) == 13 and any(batch.forks for batch in bench.batches)


def test_an_answer_that_is_cancelled_in_the_step_that_forks_it_gives_its_blocks_back_when_that_is_done() -> None:
    bench = Bench(max_num_batched_tokens=16, prefill_chunk=16)
    first, second, third = [bench.say(PROMPT, 4, prompt_group="g") for _ in range(3)]
    bench.plan()
    bench.scheduler.finish_sequence(second, FinishReason.CANCELLED)
    assert second.slot >= 0
    bench.complete()
    assert second.slot < 0
    finish(bench, first, third)


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_lost_step_undoes_its_forks(is_followed: bool) -> None:
    bench = Bench(max_num_batched_tokens=32, prefill_chunk=16)
    answers = [bench.say(PROMPT, 4, prompt_group="g") for _ in range(4)]
    bench.plan()
    if is_followed:
        bench.plan()
    bench.lose()
    assert [len(s.block_table.blocks) for s in answers[1:]] == [0, 0, 0]
    assert [s.num_cached_tokens for s in answers] == [0, 0, 0, 0]
    finish(bench, *answers)
    assert computed(bench) - bench.batches[0].lengths[0] == 13


def test_without_memory_for_all_some_start_from_the_cache_later() -> None:
    bench = Bench(num_blocks=7, max_model_len=28, max_num_batched_tokens=16, prefill_chunk=16)
    answers = [bench.say(PROMPT, 12, prompt_group="g") for _ in range(4)]
    finish(bench, *answers)
    assert 1 <= sum(len(batch.forks) for batch in bench.batches) < 3


def test_a_request_for_a_declined_block_raises_the_rate_of_return() -> None:
    """Were it taken for lost at once, a tenant that was declined a few times would be for ever."""
    bench = Bench(make_hooks=Unwilling, num_blocks=10, num_host_blocks=40)
    asked = cast(Unwilling, bench.hooks).asked
    for _ in range(4):
        for n in range(3):
            finish(bench, bench.say(list(range(300 + 40 * n, 330 + 40 * n)), 7))
    assert bench.scheduler.counters.swapped_out == 0
    assert asked == sorted(asked) and asked[-1] > 0.7


@pytest.mark.parametrize("seed", range(examples(12)))
def test_under_a_flood_leases_and_floors_hold_and_everybody_comes_to_an_end(seed: int) -> None:
    """Four tenants, three with a lease and two with a floor, ask for far more than there is."""
    random, bench = Random(seed), Bench(num_blocks=40, max_model_len=48, max_num_seqs=8, max_num_batched_tokens=16)
    scheduler, cache = bench.scheduler, bench.scheduler.kv_manager.cache
    leases, floors = {"a": 14, "b": 16, "c": 20}, {"a": 4, "d": 6}
    for tenant, blocks in leases.items():
        scheduler.allow(tenant, blocks)
    for tenant, blocks in floors.items():
        cache.limit(tenant, blocks, None)
    asked = []
    for _ in range(60):
        tenant = random.choice("abcddd")
        prompt = [*PROMPT[: random.randint(0, 13)], *[random.randrange(50) for _ in range(random.randint(1, 20))]]
        asked.append(bench.say(prompt, random.randint(1, 12), tenant, is_looked_up=random.random() < 0.5))
        bench.steps(random.randint(0, 2))
        _check_leases_and_floors(bench, leases, floors)
    while scheduler.has_work:
        bench.step()
        _check_leases_and_floors(bench, leases, floors)
    assert [s.output for s in asked] == [expected(s) for s in asked]
    assert {tenant: cache.num_idle_of(tenant) >= blocks for tenant, blocks in floors.items()} == {"a": True, "d": True}


def _check_leases_and_floors(bench: Bench, leases: dict[str, int], floors: dict[str, int]) -> None:
    kv = bench.scheduler.kv_manager
    assert all(kv.allowances.held[tenant] <= blocks for tenant, blocks in leases.items()), "a tenant is above its lease"
    kept = sum(min(blocks, kv.cache.num_idle_of(tenant)) for tenant, blocks in floors.items())
    assert kv.blocks.num_available == bench.config.num_blocks - kv.num_held - kept, (
        "what a floor keeps is not anybody's"
    )
    paused = [one for step in bench.scheduler.in_flight for one in step.paused.items()]
    for sequence, reason in paused:
        assert reason is WaitReason.ALLOWANCE and sequence.tenant in leases, "one was paused for another's limit"


def flood(bench: Bench, count: int = 6) -> None:
    for n in range(count):
        finish(bench, bench.say(list(range(300 + 20 * n, 320 + 20 * n)), 9, "flood"))


def test_a_pinned_prefix_stays_once_it_was_computed_and_its_tenant_is_charged_for_it() -> None:
    bench = Bench(num_blocks=14)
    kv = bench.scheduler.kv_manager
    bench.pin_prefixes("a", PROMPT)
    assert (kv.cache.num_kept, kv.allowances.held["a"]) == (0, 0), "nothing is computed ahead"
    first = bench.say([*PROMPT, 1, 2, 3, 4, 5], 3, "a")
    finish(bench, first)
    assert (kv.cache.num_pinned, kv.allowances.held["a"], kv.cache.num_idle_of("a")) == (3, 3, 2)
    flood(bench)
    again = bench.say([*PROMPT, 6], 3, "a")
    bench.steps(1)
    assert again.num_cached_tokens == 12
    assert kv.allowances.held["a"] == len(again.block_table.blocks), "while it runs, it pays for what it holds"
    finish(bench, again)
    bench.pin_prefixes("a")
    assert (kv.cache.num_pinned, kv.allowances.held["a"]) == (0, 0)
    flood(bench)
    last = bench.say([*PROMPT, 7], 3, "a")
    finish(bench, last)
    assert last.num_cached_tokens == 0


def test_cached_blocks_stay_once_pinned_and_are_evicted_from_the_end_once_unpinned() -> None:
    bench = Bench(num_blocks=14)
    cache = bench.scheduler.kv_manager.cache
    finish(bench, bench.say([*PROMPT, 1, 2, 3, 4, 5], 3, "a"))
    bench.pin_prefixes("a", PROMPT[:8])
    assert cache.num_pinned == 2
    bench.pin_prefixes("a", PROMPT[:4])
    assert (cache.num_pinned, cache.num_idle_of("a")) == (1, 4)
    cache.evict(3)
    found = bench.say([*PROMPT, 6], 3, "a")
    finish(bench, found)
    assert found.num_cached_tokens == 8, "the leaves went first"


def test_a_prefix_that_two_of_a_group_pin_is_charged_to_both_and_stays_for_the_last() -> None:
    bench = Bench(num_blocks=14)
    kv = bench.scheduler.kv_manager
    for tenant in "ab":
        bench.pin_prefixes(tenant, PROMPT, salt="group")
    finish(bench, bench.say(PROMPT, 3, "c", salt="group"))
    assert (kv.allowances.held["a"], kv.allowances.held["b"], kv.cache.num_pinned) == (3, 3, 3)
    bench.pin_prefixes("a")
    assert (kv.allowances.held["a"], kv.allowances.held["b"], kv.cache.num_pinned) == (0, 3, 3)
    flood(bench)
    found = bench.say(PROMPT, 3, "c", salt="group")
    finish(bench, found)
    assert found.num_cached_tokens == 12


def test_a_pin_is_within_a_lease_and_gives_way_to_what_runs() -> None:
    bench = Bench(num_blocks=24)
    kv = bench.scheduler.kv_manager
    bench.pin_prefixes("a", PROMPT, list(range(200, 212)))
    finish(bench, bench.say(PROMPT, 3, "a"), bench.say(list(range(200, 213)), 3, "a"))
    assert kv.cache.num_pinned == 6
    bench.scheduler.allow("a", 8)
    other = bench.say(list(range(500, 516)), 6, "a")
    bench.steps(1)
    assert kv.cache.num_pinned == 4, "it starts with four"
    finish(bench, other)
    assert (kv.cache.num_pinned, bench.scheduler.counters.yields) == (2, 0), "nothing stood still"
    found = bench.say([*PROMPT, 6], 3, "a")
    finish(bench, found)
    assert found.num_cached_tokens == 12, "what gave way is idle, and pinned again when it was used"
    bench.scheduler.allow("a", 3)
    assert kv.allowances.held["a"] <= 3


def test_one_that_is_preempted_and_joins_again_in_one_step_is_planned_once() -> None:
    """It is forked while it is still among those that were to be computed."""
    bench = Bench(num_blocks=8, max_model_len=24, max_num_batched_tokens=4, prefill_chunk=4, steps_in_flight=1)
    for common, group, priority_class in ((5, "long", 1), (5, "long", 1), (5, "long", 1), (1, "short", 0)):
        bench.say(PROMPT[:common], 1, "a", priority_class=priority_class, prompt_group=group)
    bench.say(PROMPT[:1], 1, "a", prompt_group="short")
    bench.drain()


class SharingMachine(LossyMachine):
    @initialize(
        num_blocks=st.one_of(st.integers(8, 14), st.integers(24, 40)),
        depth=st.integers(1, 2),
        budget=st.integers(4, 12),
        chunk=st.sampled_from([None, 3, 4, 8]),
        host=st.sampled_from([0, 3, 12]),
        is_measured=st.booleans(),
    )
    def configure(
        self, num_blocks: int, depth: int, budget: int, chunk: int | None, host: int, is_measured: bool
    ) -> None:
        self.begin(
            retention=MeasuredRetention() if is_measured else None,
            num_host_blocks=host,
            num_blocks=num_blocks,
            max_model_len=24,
            max_num_batched_tokens=24 if chunk is None else max(budget, chunk),
            prefill_chunk=chunk,
            steps_in_flight=depth,
        )

    @rule(
        common=st.integers(0, 13),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        output=st.integers(1, 8),
        tenant=st.sampled_from(["a", "b"]),
        salt=st.sampled_from([None, "group"]),
        priority_class=st.integers(0, 1),
        is_looked_up=st.booleans(),
        expects=EXPECTED,
    )
    def arrive(
        self,
        common: int,
        own: list[int],
        output: int,
        tenant: str,
        salt: str | None,
        priority_class: int,
        is_looked_up: bool,
        expects: float | None,
    ) -> None:
        prompt = [*PROMPT[:common], *own][: 24 - output]
        fields = dict(priority_class=priority_class, is_looked_up=is_looked_up, expects_followup=expects)
        self.sequences.append(self.bench.say(prompt, output, tenant, salt, **fields))

    @rule(
        common=st.integers(1, 13),
        outputs=st.lists(st.integers(1, 8), min_size=2, max_size=4),
        tenant=st.sampled_from(["a", "b"]),
        priority_class=st.integers(0, 1),
        is_looked_up=st.booleans(),
    )
    def fork(self, common: int, outputs: list[int], tenant: str, priority_class: int, is_looked_up: bool) -> None:
        fields = dict(priority_class=priority_class, is_looked_up=is_looked_up, prompt_group=f"g{len(self.sequences)}")
        self.sequences += [self.bench.say(PROMPT[:common], output, tenant, **fields) for output in outputs]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), output=st.integers(1, 6), new=st.integers(0, 3), expects=EXPECTED, is_looked_up=st.booleans())
    def follow_up(self, data: st.DataObject, output: int, new: int, expects: float | None, is_looked_up: bool) -> None:
        turn = data.draw(st.sampled_from(self.sequences))
        prompt = [*turn.request.prompt, *turn.output, new][: 24 - output]
        fields = dict(is_looked_up=is_looked_up, expects_followup=expects)
        self.sequences.append(self.bench.say(prompt, output, turn.tenant, **fields))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule()
    def plan(self) -> None:
        self.bench.plan()

    @rule(tenant=st.sampled_from(["a", "b"]), blocks=st.one_of(st.none(), st.integers(6, 10)))
    def allow(self, tenant: str, blocks: int | None) -> None:
        self.bench.scheduler.allow(tenant, blocks, self.bench.now)

    @rule(tenant=st.sampled_from(["a", "b"]), floor=st.integers(0, 1), more=st.one_of(st.none(), st.integers(0, 4)))
    def limit(self, tenant: str, floor: int, more: int | None) -> None:
        ceiling = None if more is None else floor + more
        self.bench.scheduler.kv_manager.limit_cache(tenant, floor, ceiling, self.bench.now)

    @rule(
        tenant=st.sampled_from(["a", "b"]),
        lengths=st.lists(st.integers(0, 8), max_size=2),
        salt=st.sampled_from([None, "group"]),
    )
    def pin_prefixes(self, tenant: str, lengths: list[int], salt: str | None) -> None:
        """Pin beginnings of the common prompt, as long as the longest sequence fits beside what is kept."""
        if self.has_room_for_pins():
            self.bench.pin_prefixes(tenant, *(PROMPT[:length] for length in lengths), salt=salt)

    def has_room_for_pins(self) -> bool:
        return self.bench.config.num_blocks >= 12

    def check_ends(self) -> None:
        super().check_ends()
        kv = self.bench.scheduler.kv_manager
        assert kv.allowances.held == kv.blocks.pinned_prefixes.idle_by_tenant(), "nobody is charged for anything else"
        for tenant in "ab":
            self.bench.pin_prefixes(tenant)
        assert not kv.allowances.held
        counters = self.bench.scheduler.counters
        assert counters.prompt_tokens == sum(s.num_billed_tokens for s in self.sequences)
        for sequence in self.sequences:
            assert 0 <= sequence.num_cached_tokens <= sequence.num_prefilled_tokens <= sequence.num_prompt_tokens
            if sequence.output:
                assert sequence.num_prefilled_tokens == sequence.num_prompt_tokens


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(max_examples=examples(30, at_night=4000), stateful_step_count=60, deadline=None)
