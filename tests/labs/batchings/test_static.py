"""A batch admits nobody until it has drained, and is filled beyond one step's budget."""

from backend.config import Batching
from backend.scheduler.sequence import SequenceStatus
from tests.backend.scheduler.bench import Bench


def test_static_batching_lets_nobody_join_until_the_batch_has_drained() -> None:
    bench = Bench(batching=Batching.STATIC)
    first = bench.add(3, 6)
    bench.plan()
    bench.add(3, 6)
    while first.status is not SequenceStatus.FINISHED:
        batch = bench.plan()
        assert batch is None or len(batch.slots) == 1
        bench.complete()
    bench.drain()
