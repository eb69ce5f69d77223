import pytest

from labs.simulation.errors import OptionError
from labs.simulation.page import sweep_page
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.report import sweep_table
from labs.simulation.search.sweep import parse_loads, run_sweep
from labs.simulation.study import Study, capacity
from labs.simulation.workload import Workload
from tests.labs.simulation.runs import DEVICE, TRACE

POLICIES = tuple(parse_simulated_policy(policy, DEVICE) for policy in ("fair,max_num_seqs=8", "fcfs,max_num_seqs=8"))


def study(load: float, objective: Objective) -> tuple[Study, float]:
    workload = Workload(TRACE)
    most = capacity(POLICIES[0], workload, DEVICE)
    speedup = load * most * TRACE[-1].time / len(TRACE)
    return Study(POLICIES, Workload(TRACE, speedup=speedup), DEVICE, objective), most


def test_the_knee_is_the_largest_load_with_nine_in_ten_good() -> None:
    loads = (0.3, 0.6, 3.0)
    plan, most = study(loads[0], Objective(1.0, 0.1))
    sweep = run_sweep(plan, loads, most)
    goodput = [results.runs[0][0].goodput for results in sweep.results]
    assert goodput == sorted(goodput, reverse=True) and goodput[1] >= 0.9 > goodput[2]
    assert [sweep.knee(policy) for policy in (0, 1)] == [0.6, 0.6]
    assert sweep_table(sweep).splitlines()[-1].split()[-2:] == ["0.6", "0.6"]
    assert "<title>&lt;sweep&gt;</title>" in sweep_page(sweep, "<sweep>", "facts")


@pytest.mark.nightly
def test_where_no_load_is_good_enough_there_is_no_knee() -> None:
    impossible, most = study(0.5, Objective(1e-6, 1e-6))
    sweep = run_sweep(impossible, (0.5, 0.9), most)
    assert sweep.knee(0) is None and "below all" in sweep_table(sweep)


@pytest.mark.parametrize("text", ["1", "2:1", "0:1", "1:2:1", "1:inf", "a:b", "1:2:3:4"])
def test_loads_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--sweep: write LOW:HIGH"):
        parse_loads(text)
