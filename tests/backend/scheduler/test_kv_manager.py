"""Leases of memory come, grow, shrink and go: they delay nobody else, and nothing is lost at them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from backend.scheduler.sequence import FinishReason, SequenceStatus
from tests.backend.scheduler.bench import Bench, BenchMachine, expected
from tests.examples import examples


def test_a_sequence_at_its_tenants_limit_pauses_until_the_lease_grows() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 4)
    sequence, other = bench.add(3, 12, "small"), bench.add(3, 20, "other")
    bench.plan()
    bench.scheduler.allow("small", 1)
    bench.steps(12)
    assert len(other.output) > 5
    assert sequence.status is SequenceStatus.RUNNING and len(sequence.output) < 3
    assert bench.scheduler.kv_manager.allowances.requested == {"small": 2}
    bench.scheduler.allow("small", 4)
    bench.drain()
    assert sequence.output == expected(sequence) and sequence.num_preemptions == 0


def test_a_cut_of_the_lease_takes_nothing_away_and_gives_nothing_more() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 6)
    sequence = bench.add(7, 12, "small")
    bench.steps(3)
    held = len(sequence.block_table.blocks)
    bench.scheduler.allow("small", 1)
    bench.steps(10)
    assert len(sequence.block_table.blocks) == held and sequence.status is SequenceStatus.RUNNING
    bench.scheduler.allow("small", None)
    bench.drain()
    assert sequence.output == expected(sequence)


def test_cancelling_the_one_that_did_not_fit_lets_the_next_of_its_tenant_in() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 2)
    large, small = bench.add(20, 2, "small"), bench.add(3, 2, "small")
    bench.step()
    assert small.status is SequenceStatus.WAITING
    bench.scheduler.finish_sequence(large, FinishReason.CANCELLED)
    bench.drain()
    assert small.output == expected(small)


class AllowanceMachine(BenchMachine):
    """Leases come, grow, shrink and go, sequences are extended or not; exactly those within limits are served."""

    @initialize(num_blocks=st.integers(8, 16), depth=st.integers(1, 2), slots=st.integers(1, 4))
    def start(self, num_blocks: int, depth: int, slots: int) -> None:
        self.begin(
            num_blocks=num_blocks, max_model_len=24, steps_in_flight=depth, max_num_seqs=slots, max_preemptions=50
        )

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
        self.bench.scheduler.raise_token_limit(data.draw(st.sampled_from(self.sequences)), tokens)

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
            assert sequence.num_prompt_tokens + len(sequence.output) <= max(
                sequence.token_limit, sequence.num_prompt_tokens
            )

    def teardown(self) -> None:
        for tenant in "ab" if hasattr(self, "bench") else ():
            self.bench.scheduler.allow(tenant, 6)  # each of them fits: 24 tokens
        for sequence in getattr(self, "sequences", ()):
            self.bench.scheduler.raise_token_limit(sequence, 100)
        super().teardown()


TestAllowances = AllowanceMachine.TestCase
TestAllowances.settings = settings(max_examples=examples(35, at_night=3000), stateful_step_count=40, deadline=None)
