import json

from labs.simulation.metrics import GROUPS
from labs.simulation.page import page
from labs.simulation.report import comparison_table, to_json
from tests.labs.simulation.runs import compared


def test_the_table_has_every_quantity_for_every_policy() -> None:
    text = comparison_table(compared("fair", "fcfs"))
    assert all(metric.label in text for metrics in GROUPS.values() for metric in metrics)
    assert "tenants under fair" in text and "tenants under fcfs" in text


def test_the_json_has_the_runs_and_no_number_that_json_lacks() -> None:
    results = compared("fair", "fcfs,confidence=0.8", seeds=2)
    report = json.loads(to_json(results, {"trace": "t"}))
    assert [policy["name"] for policy in report["policies"]] == ["fair", "fcfs,confidence=0.8"]
    assert report["policies"][1]["core"]["confidence"] == 0.8
    assert [run["seed"] for run in report["policies"][0]["runs"]] == [1, 2]


def test_a_run_in_which_everything_was_refused_still_has_a_report() -> None:
    results = compared("fair,max_model_len=8", tenants="2", seeds=1)
    assert results.runs[0][0].refusals == {"TooLong": 120}
    assert "TooLong" in page(results, "t", "f") and comparison_table(results)
    to_json(results, {})
