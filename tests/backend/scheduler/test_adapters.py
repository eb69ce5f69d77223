"""Adapters' blocks as the scheduler plans them: who is passed over, who pays, what a lost step brings again."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from backend.adapter import Adapter, make_adapter
from backend.config import EngineConfig
from backend.paged_kv.block_names import adapter_salt
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from tests.backend.scheduler.bench import LossyMachine
from tests.backend.sequences import make_sequence
from tests.examples import examples

CONFIG = EngineConfig(40, 64, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, prefill_chunk=8)
MOST_COPIED = 8  # blocks a step, of this configuration


class Planned:
    """A scheduler whose steps are executed on paper."""

    def __init__(self, config: EngineConfig = CONFIG, hooks: DefaultHooks | None = None) -> None:
        self.scheduler = Scheduler(config, FirstComeFirstServed(), hooks)
        self.numbers = 0

    def adapter(self, num_blocks: int) -> Adapter:
        self.numbers += 1
        return make_adapter(f"adapter {self.numbers}", "", self.numbers, num_blocks)

    def add(self, tenant: str, adapter: Adapter | None = None, output: int = 8) -> Sequence:
        self.numbers += 1
        name = f"{tenant} {self.numbers}"
        sequence = make_sequence(name, tenant, 2, output, (), arrival=float(self.numbers), adapter=adapter)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch is not None
        self.scheduler.check_integrity()
        return batch

    def step(self) -> Batch:
        batch = self.plan()
        self.scheduler.update_from_output(StepOutput(batch.step, [0] * len(batch.sampled), 0.0))
        self.scheduler.check_integrity()
        return batch

    @property
    def held(self) -> dict[str, int]:
        """The blocks that each tenant is charged for."""
        return dict(self.scheduler.kv_manager.allowances.held)


def test_a_step_brings_some_adapters_and_passes_over_others_without_blocking_anybody() -> None:
    planned = Planned()
    first, second = planned.adapter(6), planned.adapter(6)
    one, two, three = planned.add("a", first), planned.add("b", second), planned.add("c")
    batch = planned.step()
    assert {number for number, _, _ in batch.adapter_blocks} == {first.number}
    assert [new.slot for new in batch.admitted] == [one.slot, three.slot] and two.slot < 0
    assert planned.scheduler.held_tenants == {"b": WaitReason.ADAPTER}
    batch = planned.step()
    assert [index for number, index, _ in batch.adapter_blocks if number == second.number] == list(range(6))
    assert two.slot >= 0 and not planned.scheduler.held_tenants


def test_the_first_adapter_of_a_step_is_brought_however_large() -> None:
    planned = Planned()
    sequence = planned.add("a", planned.adapter(2 * MOST_COPIED))
    assert len(planned.step().adapter_blocks) == 2 * MOST_COPIED
    assert sequence.slot >= 0


def test_each_tenant_pays_once_for_an_adapter_while_it_runs_and_none_when_it_is_idle() -> None:
    planned = Planned()
    shared = planned.adapter(5)
    sequences = [planned.add(tenant, shared) for tenant in ("a", "a", "b")]
    batch = planned.step()
    assert len(batch.adapter_blocks) == 5, "it is brought once"
    assert batch.admitted[0].adapter == batch.admitted[2].adapter
    assert planned.held == {"a": 5 + 2, "b": 5 + 1}
    for sequence in sequences:
        planned.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
    planned.scheduler.check_integrity()
    assert planned.held == {}
    again = planned.add("b", shared)
    assert not planned.step().adapter_blocks, "it was idle, and is on the device"
    assert again.slot >= 0 and planned.held == {"b": 6}


def test_an_idle_adapter_gives_way_to_another_and_comes_back_in_parts() -> None:
    planned = Planned()
    old, new = planned.adapter(22), planned.adapter(22)
    for adapter in (old, new, old):
        sequence = planned.add("a", adapter)
        brought = planned.step().adapter_blocks
        planned.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
        planned.scheduler.check_integrity()
    assert {number for number, _, _ in brought} == {old.number}
    assert 0 < len(brought) < 22, "what was not evicted is not brought again"


def test_an_adapter_is_not_given_up_while_a_step_in_flight_names_it() -> None:
    planned = Planned()
    adapter, other = planned.adapter(30), planned.adapter(30)
    running = planned.add("a", adapter)
    batch = planned.plan()
    blocks = {block for _, _, block in batch.adapter_blocks}
    planned.scheduler.finish_sequence(running, FinishReason.CANCELLED)
    planned.add("b", other)
    assert planned.scheduler.schedule() is None, "its memory is in use until the step is done"
    assert planned.held == {"a": 31}
    planned.scheduler.update_from_output(StepOutput(batch.step, [0] * len(batch.sampled), 0.0))
    assert {block for _, _, block in planned.step().adapter_blocks} & blocks


def test_the_copies_of_a_lost_step_are_made_again_by_the_next() -> None:
    planned = Planned()
    sequence = planned.add("a", planned.adapter(6))
    lost = planned.plan()
    assert planned.scheduler.rollback()
    planned.scheduler.check_integrity()
    again = planned.plan()
    assert again.adapter_blocks == lost.adapter_blocks
    assert again.admitted[0].adapter == lost.admitted[0].adapter and sequence.slot >= 0


def test_a_lease_covers_the_adapter_beside_the_tokens() -> None:
    planned = Planned()
    planned.scheduler.allow("a", 7)
    waiting = planned.add("a", planned.adapter(6), output=8)
    beside = planned.add("b")
    planned.step()
    assert waiting.slot < 0 <= beside.slot
    assert planned.scheduler.held_tenants == {"a": WaitReason.ALLOWANCE}
    planned.scheduler.allow("a", 9)
    planned.step()
    assert waiting.slot >= 0


class AdapterMachine(LossyMachine):
    """Requests of two tenants with adapters that are replaced meanwhile, over memory for one or two of them."""

    @initialize(host=st.sampled_from([0, 4, 16]), depth=st.integers(1, 2), caches=st.booleans())
    def start(self, host: int, depth: int, caches: bool) -> None:
        self.begin(
            num_blocks=18, num_host_blocks=host * caches, steps_in_flight=depth, prefix_cache=caches, max_adapter_rank=8
        )
        self.adapters: list[Adapter | None] = [None]
        self.number = 0

    @rule(size=st.integers(1, 5), digest=st.sampled_from("xyz"))
    def load(self, size: int, digest: str) -> None:
        self.number += 1
        self.adapters = [*self.adapters[-4:], make_adapter("law", digest, self.number, size)]

    @rule(
        prompt=st.integers(0, 3),
        length=st.integers(1, 20),
        output=st.integers(1, 12),
        tenant=st.sampled_from("ab"),
        which=st.integers(0, 4),
        answers=st.integers(1, 3),
        is_looked_up=st.booleans(),
        level=st.integers(0, 1),
    )
    def ask(
        self,
        prompt: int,
        length: int,
        output: int,
        tenant: str,
        which: int,
        answers: int,
        is_looked_up: bool,
        level: int,
    ) -> None:
        bench, adapter = self.bench, self.adapters[which % len(self.adapters)]
        root = bench.names.root(tenant, *adapter_salt(None if adapter is None else adapter.digest))
        tokens = [100 * prompt + place for place in range(length)]
        for _ in range(answers if len(self.sequences) < 25 else 0):
            group = f"{tenant} {self.number} {which} {tokens}" if answers > 1 else None
            self.sequences.append(
                bench.say(
                    tokens,
                    output,
                    tenant,
                    cache_root=root,
                    is_looked_up=is_looked_up,
                    adapter=adapter,
                    prompt_group=group,
                    priority_class=level,
                )
            )

    @rule()
    def plan(self) -> None:
        self.bench.plan()

    @rule(tenant=st.sampled_from("ab"), floor=st.integers(0, 1), ceiling=st.sampled_from([None, 2, 5]))
    def limit(self, tenant: str, floor: int, ceiling: int | None) -> None:
        self.bench.scheduler.kv_manager.limit_cache(tenant, floor, ceiling, self.bench.now)

    @rule(tenant=st.sampled_from("ab"), blocks=st.sampled_from([None, 15, 17]))
    def allow(self, tenant: str, blocks: int | None) -> None:
        self.bench.scheduler.allow(tenant, blocks, self.bench.now)


TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = settings(max_examples=examples(12, at_night=2000), stateful_step_count=50, deadline=None)
