from backend.scheduler.sequence import FinishReason, SequenceStatus
from tests.backend.scheduler.bench import Bench, expected


def test_preemption_recomputes_and_the_output_is_unchanged() -> None:
    bench = Bench(num_blocks=10)
    sequences = [bench.add(6, 25) for _ in range(4)]
    bench.drain()
    assert bench.scheduler.counters.preemptions > 0
    assert [s.output for s in sequences] == [expected(s) for s in sequences]


def test_the_oldest_is_never_preempted() -> None:
    bench = Bench(num_blocks=10)
    oldest = bench.add(6, 25)
    for _ in range(3):
        bench.add(6, 25)
    bench.drain()
    assert oldest.num_preemptions == 0


def test_a_sequence_is_preempted_at_most_so_often_and_then_ends_for_good() -> None:
    bench = Bench(num_blocks=10, max_preemptions=1)
    sequences = [bench.add(6, 25) for _ in range(4)]
    bench.drain()
    ended = bench.scheduler.take_ended()
    assert max(s.num_preemptions for s in sequences) == 1
    assert all(s.finish_reason is FinishReason.PREEMPTED for s in ended)
    assert [s.output for s in sequences if s not in ended] == [expected(s) for s in sequences if s not in ended]


def test_a_higher_class_takes_the_slot_of_a_lower_one_at_a_full_batch() -> None:
    bench = Bench()
    lower = [bench.add(2, 20, priority_class=1) for _ in range(4)]
    bench.plan()
    bench.complete()
    urgent = bench.add(2, 4)
    bench.plan()
    bench.complete()
    bench.plan()
    assert urgent.status is SequenceStatus.RUNNING
    assert [s.num_preemptions for s in lower] == [0, 0, 0, 1]
    assert bench.scheduler.counters.all_preemptions == (0, 1, 0, 0), "of a pool with room, for the slot alone"
    bench.drain()
    assert [s.output for s in [*lower, urgent]] == [expected(s) for s in [*lower, urgent]]


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


def test_paused_sequences_of_one_tenant_do_not_keep_slots_from_another() -> None:
    bench = Bench(max_num_seqs=1)
    paused = bench.add(3, 9, "small")
    paused.limit_to(1)
    other = bench.add(3, 5, "other")
    bench.steps(10)
    assert other.output == expected(other)
    assert paused.status is SequenceStatus.WAITING and paused.num_preemptions == 0
    bench.scheduler.raise_token_limit(paused, 100)
    bench.drain()
    assert paused.output == expected(paused)


def test_a_paused_sequence_gives_way_when_another_tenant_lacks_memory() -> None:
    bench = Bench(num_blocks=10)
    bench.scheduler.allow("small", 6)
    paused = bench.add(20, 8, "small")
    bench.steps(5)
    bench.scheduler.allow("small", 1)
    other = bench.add(19, 21, "other")
    bench.steps(60)
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
    bench.scheduler.raise_token_limit(paused, 5)
    bench.drain()
    assert all(sequence.output == expected(sequence) for sequence in (paused, runs, waits))


def test_a_slot_that_is_free_is_given_while_another_is_being_freed() -> None:
    """The victim is in two steps, and after the first of them another answer has ended."""
    bench = Bench(num_blocks=64)
    lower = [bench.add(2, length, ends=(), priority_class=1) for length in (3, 20, 20, 20)]
    bench.plan()
    bench.plan()
    bench.complete()
    bench.plan()
    urgent = bench.add(2, 4, "urgent", ends=())
    bench.complete()
    bench.plan()
    assert bench.scheduler.kv_manager.freeing
    bench.complete()
    bench.plan()
    assert bench.scheduler.kv_manager.freeing and urgent.status is SequenceStatus.RUNNING
    bench.drain()
    assert [len(s.output) for s in [*lower, urgent]] == [3, 20, 20, 20, 4]
