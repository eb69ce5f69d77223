"""Limits of a tenant's own: they delay nobody else, and nothing is lost at them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from tests.backend.scheduler.bench import Bench, expected
from tests.examples import examples


def test_a_tenant_at_its_limit_is_passed_over_and_the_others_are_not() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 2)
    first, second, other = bench.add(7, 1, "small"), bench.add(7, 1, "small"), bench.add(4, 1, "other")
    bench.plan(), bench.plan()
    assert first.status is other.status is SequenceStatus.RUNNING and second.status is SequenceStatus.WAITING
    assert bench.scheduler.held_tenants == {"small": WaitReason.ALLOWANCE}
    bench.drain()
    assert second.output == expected(second)


def test_a_sequence_at_its_tenants_limit_pauses_until_the_lease_grows() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 4)
    sequence, other = bench.add(3, 12, "small"), bench.add(3, 20, "other")
    bench.plan()
    bench.scheduler.allow("small", 1)
    for _ in range(12):
        bench.step()
    assert len(other.output) > 5
    assert sequence.status is SequenceStatus.RUNNING and len(sequence.output) < 3
    assert bench.scheduler.kv_manager.allowances.requested == {"small": 2}
    bench.scheduler.allow("small", 4)
    bench.drain()
    assert sequence.output == expected(sequence) and sequence.num_preemptions == 0


def test_where_all_of_a_tenants_sequences_are_paused_the_youngest_makes_way_for_the_oldest() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 5)
    old, young = bench.add(3, 12, "small"), bench.add(3, 12, "small")
    bench.drain()
    assert old.num_yields == 0 and young.num_yields > 0 and young.num_preemptions == 0
    assert (old.output, young.output) == (expected(old), expected(young))


def test_tenants_whose_youngest_give_way_at_once_do_so_in_the_order_in_which_they_were_paused() -> None:
    """In that of a set of names, which differs from process to process, no replay would decide the same."""
    bench = Bench(num_blocks=200, max_num_seqs=32, max_num_batched_tokens=256, steps_in_flight=1)
    tenants = [f"tenant-{n}" for n in range(16)]
    _, young = ([bench.add(8, 12, tenant) for tenant in tenants] for _ in range(2))
    bench.step()
    for tenant in tenants:
        bench.scheduler.allow(tenant, 5)
    while not bench.scheduler.preempted:
        bench.step()
    assert bench.scheduler.preempted == [sequence for sequence in young if sequence.num_yields]
    assert len(bench.scheduler.preempted) > 4, "in another order they would come by chance"


def test_a_cut_of_the_lease_takes_nothing_away_and_gives_nothing_more() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 6)
    sequence = bench.add(7, 12, "small")
    for _ in range(3):
        bench.step()
    held = len(sequence.block_table)
    bench.scheduler.allow("small", 1)
    for _ in range(10):
        bench.step()
    assert len(sequence.block_table) == held and sequence.status is SequenceStatus.RUNNING
    bench.scheduler.allow("small", None)
    bench.drain()
    assert sequence.output == expected(sequence)


def test_the_first_of_a_tenant_starts_only_when_it_can_run_to_its_end() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 3)
    sequence = bench.add(3, 12, "small")
    bench.step()
    assert sequence.status is SequenceStatus.WAITING and bench.scheduler.demand("small") == 4
    bench.scheduler.allow("small", 4)
    bench.drain()
    assert sequence.output == expected(sequence) and sequence.num_yields == 0


def test_demand_is_what_the_tenants_running_sequences_may_need() -> None:
    bench = Bench()
    assert bench.scheduler.demand("small") == 0
    bench.add(7, 12, "small")
    bench.plan()
    assert bench.scheduler.demand("small") == 5
    bench.drain()
    assert bench.scheduler.demand("small") == 0


def test_a_sequence_stops_at_the_tokens_it_may_generate_and_goes_on_when_it_may_more() -> None:
    bench = Bench()
    sequence = bench.add(3, 9, "small")
    sequence.limit_to(2)
    for _ in range(8):
        bench.step()
    assert len(sequence.output) == 2 and not bench.scheduler.in_flight
    bench.scheduler.extend(sequence, 3)
    for _ in range(8):
        bench.step()
    assert len(sequence.output) == 5
    bench.scheduler.extend(sequence, 100)
    bench.drain()
    assert sequence.output == expected(sequence)


def test_paused_sequences_of_one_tenant_do_not_keep_slots_from_another() -> None:
    bench = Bench(max_num_seqs=1)
    paused = bench.add(3, 9, "small")
    paused.limit_to(1)
    other = bench.add(3, 5, "other")
    for _ in range(10):
        bench.step()
    assert other.output == expected(other)
    assert paused.status is SequenceStatus.WAITING and paused.num_preemptions == 0
    bench.scheduler.extend(paused, 100)
    bench.drain()
    assert paused.output == expected(paused)


def test_a_paused_sequence_gives_way_when_another_tenant_lacks_memory() -> None:
    bench = Bench(num_blocks=10)
    bench.scheduler.allow("small", 6)
    paused = bench.add(20, 8, "small")
    for _ in range(5):
        bench.step()
    bench.scheduler.allow("small", 1)
    other = bench.add(19, 21, "other")
    for _ in range(60):
        bench.step()
    assert other.output == expected(other)
    bench.scheduler.allow("small", 10)
    bench.drain()
    assert paused.output == expected(paused)


def test_one_gives_way_where_both_who_runs_and_who_waits_lack_memory() -> None:
    bench = Bench(num_blocks=8, max_model_len=24, steps_in_flight=1)
    paused, runs = bench.add(13, 6, "paused"), bench.add(11, 10, "runs")
    paused.limit_to(1)
    while runs.num_computed_tokens < 16:
        bench.step()
    waits = bench.add(4, 2, "waits")
    bench.step()
    assert (paused.num_yields, runs.num_preemptions, runs.num_yields) == (1, 0, 0)
    assert runs.num_computed_tokens == 17
    bench.scheduler.extend(paused, 5)
    bench.drain()
    assert all(sequence.output == expected(sequence) for sequence in (paused, runs, waits))


def test_cancelling_the_one_that_did_not_fit_lets_the_next_of_its_tenant_in() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 2)
    large, small = bench.add(20, 2, "small"), bench.add(3, 2, "small")
    bench.step()
    assert small.status is SequenceStatus.WAITING
    bench.scheduler.finish(large, FinishReason.CANCELLED)
    bench.drain()
    assert small.output == expected(small)


class AllowanceMachine(RuleBasedStateMachine):
    """Leases come, grow, shrink and go, sequences are extended or not; whoever may run is served, exactly."""

    @initialize(num_blocks=st.integers(8, 16), depth=st.integers(1, 2), slots=st.integers(1, 4))
    def start(self, num_blocks: int, depth: int, slots: int) -> None:
        self.bench = Bench(
            num_blocks=num_blocks, max_model_len=24, steps_in_flight=depth, max_num_seqs=slots, max_preemptions=50
        )
        self.sequences: list[Sequence] = []
        self.cancelled: set[Sequence] = set()

    @rule(tenant=st.sampled_from("abc"), prompt=st.integers(1, 14), most=st.integers(1, 10), now=st.integers(0, 10))
    def arrive(self, tenant: str, prompt: int, most: int, now: int) -> None:
        sequence = self.bench.add(prompt, most, tenant)
        sequence.limit_to(now)
        self.sequences.append(sequence)

    @rule(tenant=st.sampled_from("ab"), blocks=st.one_of(st.none(), st.integers(0, 10)))
    def allow(self, tenant: str, blocks: int | None) -> None:
        self.bench.scheduler.allow(tenant, blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        self.bench.scheduler.extend(data.draw(st.sampled_from(self.sequences)), tokens)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.status is not SequenceStatus.FINISHED:
            self.cancelled.add(sequence)
        self.bench.scheduler.finish(sequence, FinishReason.CANCELLED)

    @rule()
    def step(self) -> None:
        before = dict(self.bench.scheduler.kv_manager.allowances.held)
        self.bench.step()
        allowances = self.bench.scheduler.kv_manager.allowances
        for tenant, held in allowances.held.items():
            allowed = allowances.allowed(tenant)
            assert allowed is None or held <= max(allowed, before.get(tenant, 0)), "more than the lease was given"

    @invariant()
    def nobody_generates_more_than_it_may(self) -> None:
        for sequence in getattr(self, "sequences", ()):
            assert len(sequence.prompt) + len(sequence.output) <= max(sequence.token_limit, len(sequence.prompt))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for tenant in "ab":
            self.bench.scheduler.allow(tenant, 6)  # each of them fits: 24 tokens
        for sequence in self.sequences:
            self.bench.scheduler.extend(sequence, 100)
        self.bench.drain()
        for sequence in self.sequences:
            if sequence not in self.cancelled and sequence.finish_reason is not FinishReason.PREEMPTED:
                assert sequence.output == expected(sequence)


TestAllowances = AllowanceMachine.TestCase
TestAllowances.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
