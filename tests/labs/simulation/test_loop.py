import pytest

from admission.core import ORDERS
from labs.simulation.arrival import Arrival
from labs.simulation.workload import Workload
from tests.labs.simulation.runs import TRACE, simulated

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


def test_clients_without_patience_leave_and_take_nothing_with_them() -> None:
    arrivals = [Arrival(0.0, 200, 50, patience=0.5) for _ in range(60)]
    recorder, core, _ = simulated("fair,kv_tokens=2048,max_model_len=512", arrivals)
    assert recorder.left > 0 and recorder.left + sum(t.completed for t in recorder.tenants.values()) == 60
    assert not core.scheduler.has_work and len(core.scheduler.waiting) == 0
    core.scheduler.check_integrity()
