import pytest

from labs.simulation.arrival import Arrival
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import Study, busiest, capacity, simulate_run
from labs.simulation.workload import Workload
from tests.labs.simulation.runs import DEVICE, TRACE, compared


def test_refusals_are_counted_by_reason_and_stay_in_the_denominator() -> None:
    arrivals = [Arrival(0.0, 100, 5) for _ in range(10)] + [Arrival(0.0, 5000, 5)]
    policy = parse_simulated_policy("fcfs,max_waiting=4,kv_tokens=2048", DEVICE)
    summary = simulate_run(policy, arrivals, DEVICE, Objective())
    assert summary.refusals == {"QueueFull": 6, "TooLong": 1}
    assert summary.goodput == pytest.approx(4 / 11) and summary.completed == 4


def test_a_run_is_the_same_every_time_and_in_another_process() -> None:
    here, there = compared("fair", "fcfs"), compared("fair", "fcfs", jobs=2)
    assert here.runs == there.runs == compared("fair", "fcfs").runs


def test_gaps_are_measured_between_the_busiest_tenants() -> None:
    """Eight tenants send one request each before the two come that have work waiting for minutes, and whose
    requests are served in order: of more seats each would have its share.
    """
    arrivals = [Arrival(0.1 * n, 20, 2, tenant=f"early-{n}") for n in range(8)]
    arrivals += [Arrival(1.0 + n / 1000, 400, 50, tenant=f"busy-{n // 60}") for n in range(120)]
    policy = parse_simulated_policy("fcfs,max_num_seqs=1,overload=unbounded", DEVICE)
    summary = simulate_run(policy, arrivals, DEVICE, Objective())
    assert summary.gap_tokens > 50 * (400 + 2 * 50)
    assert busiest(arrivals) == {"busy-0", "busy-1", *(f"early-{n}" for n in range(6))}


def test_capacity_is_what_a_full_machine_completes() -> None:
    workload = Workload(TRACE)
    policy = parse_simulated_policy("fcfs", DEVICE)
    rate = capacity(policy, workload, DEVICE)
    calm = Study((policy,), Workload(TRACE, requests=600, rate=0.5 * rate), DEVICE, Objective()).run().runs[0][0]
    assert calm.busy < 1 and calm.completed == 600 and calm.seconds == pytest.approx(600 / (0.5 * rate), rel=0.15)


def test_the_outcomes_of_a_run_cover_every_request() -> None:
    """Requests are refused, given up, completed, and leave."""
    trace = tuple(arrival._replace(done_within=20.0) for arrival in TRACE)
    workload = Workload(trace, speedup=40.0, patience=1.5)
    texts = ("overload=controlled_delay,max_num_seqs=2", "overload=bounded,max_num_seqs=2,max_waiting=9", "fair")
    policies = tuple(parse_simulated_policy(text, DEVICE) for text in texts)
    runs = [run for (run,) in Study(policies, workload, DEVICE, Objective()).run().runs]
    assert any(run.given_up for run in runs) and any(run.left for run in runs)
    assert any("QueueFull" in run.refusals for run in runs)
    for run in runs:
        assert run.completed + sum(run.refusals.values()) + run.given_up + run.left + run.lost == run.offered
