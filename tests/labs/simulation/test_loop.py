import pytest

from admission.core import ORDERS
from admission.step_times.step_time import StepWork
from labs.simulation.arrival import Arrival
from labs.simulation.workload import Workload
from tests.labs.simulation.runs import DEVICE, TRACE, simulated

TIGHT = "kv_tokens=1024,max_model_len=512,max_num_seqs=16"


@pytest.mark.parametrize("order", list(ORDERS))
def test_every_request_gets_its_tokens_and_its_share_of_the_busy_time_is_someones(order: str) -> None:
    arrivals = Workload(TRACE, speedup=4.0, tenants="3", classes="0:1,1:1", context=512).arrivals(1)
    recorder, core, end = simulated(f"order={order},{TIGHT}", arrivals)
    tenants = recorder.tenants.values()
    assert sum(t.completed for t in tenants) == len(arrivals)
    assert sum(t.output_tokens for t in tenants) == sum(a.output_tokens for a in arrivals)
    assert sum(t.prompt_tokens for t in tenants) == sum(a.prompt_tokens for a in arrivals)
    assert sum(t.seconds for t in tenants) == pytest.approx(recorder.busy) and recorder.busy <= end
    assert recorder.preemptions == core.scheduler.counters.preemptions
    assert not core.scheduler.has_work
    core.scheduler.check_integrity()


def test_a_lone_request_takes_exactly_its_steps() -> None:
    recorder, _, end = simulated("fcfs,steps_in_flight=1", [Arrival(0.0, 100, 3)])
    prefill = DEVICE.seconds(StepWork(prefill_tokens=100))
    first, second = (DEVICE.seconds(StepWork(0, 1, context)) for context in (101, 102))
    assert recorder.first_token_times[0] == pytest.approx(prefill)
    assert end == pytest.approx(prefill + first + second)
    assert recorder.token_times[0] == pytest.approx((first + second) / 2)


def test_an_answer_ends_at_the_traces_length_with_any_declared_one() -> None:
    arrivals = [Arrival(0.1 * n, 80, 10 + n, max_tokens=200) for n in range(30)]
    recorder, core, _ = simulated("fair", arrivals)
    assert sum(t.output_tokens for t in recorder.tenants.values()) == sum(a.output_tokens for a in arrivals)
    assert core.scheduler.counters.late_tokens > 0  # two steps in flight: the end is known one step late


def test_clients_without_patience_leave_and_take_nothing_with_them() -> None:
    arrivals = [Arrival(0.0, 200, 50, patience=0.5) for _ in range(60)]
    recorder, core, _ = simulated("fair,kv_tokens=2048,max_model_len=512", arrivals)
    assert recorder.left > 0 and recorder.left + sum(t.completed for t in recorder.tenants.values()) == 60
    assert not core.scheduler.has_work and len(core.scheduler.waiting) == 0
    core.scheduler.check_integrity()
