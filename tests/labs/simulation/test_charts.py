import pytest

from labs.simulation.charts import Bars, charts
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import Study
from labs.simulation.workload import Workload
from tests.labs.simulation.runs import DEVICE, TRACE


def test_the_chart_of_outcomes_leaves_nobody_out() -> None:
    """Requests are refused, given up, completed, and leave."""
    trace = tuple(arrival._replace(done_within=20.0) for arrival in TRACE)
    workload = Workload(trace, speedup=40.0, patience=1.5)
    texts = ("overload=controlled_delay,max_num_seqs=2", "overload=bounded,max_num_seqs=2,max_waiting=9", "fair")
    policies = tuple(parse_simulated_policy(text, DEVICE) for text in texts)
    results = Study(policies, workload, DEVICE, Objective()).run()
    outcomes = charts(results)[0]
    assert isinstance(outcomes, Bars)
    assert {"given up, too late", "refused: QueueFull", "left waiting"} <= set(outcomes.groups)
    for n in range(len(texts)):
        assert sum(bars[n].median for bars in outcomes.bars if bars[n]) == pytest.approx(1.0)
