"""What workers report, added up."""

from gateway.http.connection_table import ConnectionState
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.workers.stats import PoolStats, WorkerStats, _taken, add_latencies

NUM_STATES = len(ConnectionState)


def test_counts_of_a_dead_worker_stay_and_its_connections_do_not() -> None:
    stats = PoolStats(2, lambda: 2)
    stats.by_worker[0] = WorkerStats([1] * NUM_STATES, [2] * NUM_STATES, 3)
    stats.by_worker[1] = WorkerStats([10] * NUM_STATES, [20] * NUM_STATES, 30)
    assert [stats.num(state) for state in ConnectionState] == [11] * NUM_STATES
    for _ in range(2):
        stats.left(0)
        assert [stats.num(state) for state in ConnectionState] == [10] * NUM_STATES
        assert (stats.num_evicted, stats.num_refused) == ([22] * NUM_STATES, 33)
    stats.by_worker[0] = WorkerStats([0] * NUM_STATES, [1] * NUM_STATES, 1)
    assert (stats.num_evicted, stats.num_refused) == ([23] * NUM_STATES, 34)


def test_latencies_are_reported_once() -> None:
    mine, all_of_them = DeliveryMetrics(lambda: 0.0), DeliveryMetrics(lambda: 0.0)
    mine.first_token.observe(0.03)
    mine.gap.observe(0.02, 5)
    for _ in range(3):
        add_latencies(all_of_them, [_taken(mine.first_token), _taken(mine.gap)])
    assert (sum(all_of_them.first_token.counts), all_of_them.first_token.sum) == (1, 0.03)
    assert sum(all_of_them.gap.counts) == 5
    assert sum(mine.gap.counts) == mine.gap.sum == 0
