from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import SequenceStatus
from tests.backend.scheduler.bench import Bench, expected


def test_a_tenant_at_its_limit_is_held_and_the_others_are_not() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 2)
    first, second, other = bench.add(7, 1, "small"), bench.add(7, 1, "small"), bench.add(4, 1, "other")
    bench.plan(), bench.plan()
    assert first.status is other.status is SequenceStatus.RUNNING and second.status is SequenceStatus.WAITING
    assert bench.scheduler.held_tenants == {"small": WaitReason.ALLOWANCE}
    bench.drain()
    assert second.output == expected(second)


def test_the_first_of_a_tenant_starts_only_when_it_can_run_to_its_end() -> None:
    bench = Bench()
    bench.scheduler.allow("small", 3)
    sequence = bench.add(3, 12, "small")
    bench.step()
    assert sequence.status is SequenceStatus.WAITING and bench.scheduler.limits.demand("small") == 4
    bench.scheduler.allow("small", 4)
    bench.drain()
    assert sequence.output == expected(sequence) and sequence.num_yields == 0


def test_demand_is_what_the_tenants_running_sequences_may_need() -> None:
    bench = Bench()
    assert bench.scheduler.limits.demand("small") == 0
    bench.add(7, 12, "small")
    bench.plan()
    assert bench.scheduler.limits.demand("small") == 5
    bench.drain()
    assert bench.scheduler.limits.demand("small") == 0


def test_a_sequence_stops_at_the_tokens_it_may_generate_and_goes_on_when_it_may_more() -> None:
    bench = Bench()
    sequence = bench.add(3, 9, "small")
    sequence.limit_to(2)
    bench.steps(8)
    assert len(sequence.output) == 2 and not bench.scheduler.in_flight
    bench.scheduler.raise_token_limit(sequence, 3)
    bench.steps(8)
    assert len(sequence.output) == 5
    bench.scheduler.raise_token_limit(sequence, 100)
    bench.drain()
    assert sequence.output == expected(sequence)
