import labs.contiguous_pool  # noqa: F401 - adds it
from backend.config import KVAllocation
from tests.backend.scheduler.bench import Bench


def test_contiguous_allocation_takes_the_whole_run_up_front() -> None:
    bench = Bench(kv_allocation=KVAllocation.CONTIGUOUS)
    sequence = bench.add(5, 12)
    bench.plan()
    assert sequence.block_table.blocks == [0, 1, 2, 3]
    bench.drain()
