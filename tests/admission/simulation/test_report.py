"""Reports: complete, well formed, and unharmed by the names in them."""

import json
from xml.etree import ElementTree as ET

import pytest

from admission.simulation.charts import Bars, charts
from admission.simulation.metrics import GROUPS, format_duration, format_number, format_percent
from admission.simulation.page import page
from admission.simulation.policy import parse_simulated_policy
from admission.simulation.recorder import Objective
from admission.simulation.report import comparison_table, to_json
from admission.simulation.study import Study
from admission.simulation.svg import svg
from admission.simulation.workload import Workload
from tests.admission.simulation.runs import DEVICE, TRACE, compared

HOSTILE = "<script>alert(1)</script>&\"'$\\frac\x1b[31m"


def test_the_table_has_every_quantity_for_every_policy() -> None:
    text = comparison_table(compared("fair", "fcfs"))
    assert all(metric.label in text for metrics in GROUPS.values() for metric in metrics)
    assert "tenants under fair" in text and "tenants under fcfs" in text


def test_a_hostile_name_is_text_wherever_it_is_shown() -> None:
    results = compared("fair", "fcfs", tenants=f"{HOSTILE}:1,b:1")
    html = page(results, HOSTILE, HOSTILE)
    assert "<script" not in html and "\x1b" not in html and "\x1b" not in comparison_table(results)
    tags = {element.tag for chart in charts(results) for element in ET.fromstring(svg(chart)).iter()}
    assert tags == {"svg", "text", "line", "path", "rect"}


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    html = page(compared("fair", "fcfs"), "title", "facts")
    for sign in ("http", "src=", "url(", "@import", "<link", "<script"):
        assert sign not in html


def test_the_json_has_the_runs_and_no_number_that_json_lacks() -> None:
    results = compared("fair", "fcfs,quantum=0.1", seeds=2)
    report = json.loads(to_json(results, {"trace": "t"}))
    assert [policy["name"] for policy in report["policies"]] == ["fair", "fcfs,quantum=0.1"]
    assert report["policies"][1]["core"]["quantum"] == 0.1
    assert [run["seed"] for run in report["policies"][0]["runs"]] == [1, 2]


def test_a_run_in_which_everything_was_refused_still_has_a_report() -> None:
    results = compared("fair,max_model_len=8", tenants="2", seeds=1)
    assert results.runs[0][0].refusals == {"TooLong": 120}
    assert "TooLong" in page(results, "t", "f") and comparison_table(results)
    to_json(results, {})


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


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_duration(0.0), "0 s"),
        (format_duration(0.0123), "12.3 ms"),
        (format_duration(0.45), "450 ms"),
        (format_duration(1.234), "1.23 s"),
        (format_duration(12345.6), "12,346 s"),
        (format_number(1234567.8), "1,234,568"),
        (format_number(2.5), "2.5"),
        (format_percent(0.1234), "12.3 %"),
    ],
)
def test_figures_read_as_people_write_them(shown: str, expected: str) -> None:
    assert shown == expected
