from random import Random

from labs.benchmarks.fairness import FAIR, FCFS, _makespan, arrivals


def test_busy_tenants_take_no_memory_of_each_other_that_is_computed_again() -> None:
    """Tenants took the memory of the others: 0.95 of the throughput was left."""
    requests = [arrival._replace(time=0.0) for arrival in arrivals(1, 15.0)]
    Random(1).shuffle(requests)
    assert _makespan(FCFS, requests) / _makespan(FAIR, requests) >= 0.99
