import json
from pathlib import Path

from labs.benchmarks.report import Report, Spread


def report(quick: bool = False) -> Report:
    made = Report("scenario", quick, machine={"cpu": "one"})
    made.add_table("figures", [{"engine": "ours", "tok/s": Spread.of([3.0, 1.0, 2.0])}])
    return made


def test_a_missed_target_is_printed_as_a_miss_and_fails_the_command(tmp_path: Path) -> None:
    missed = report()
    missed.at_least("ratio", 0.7, 0.8)
    assert "MISS  ratio: 0.7 (target >= 0.8)" in missed.text()
    assert missed.finish(tmp_path) == 1


def test_a_quick_run_does_not_judge_and_keeps_its_own_file(tmp_path: Path) -> None:
    quick = report(quick=True)
    quick.at_least("ratio", 0.7, 0.8)
    assert quick.finish(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.quick.json"]


def test_results_hold_machine_figures_and_verdicts(tmp_path: Path) -> None:
    made = report()
    made.at_most("idle", 0.5, 0.02)
    made.finish(tmp_path)
    found = json.loads((tmp_path / "scenario.json").read_text())
    assert found["machine"] == {"cpu": "one"}
    assert found["tables"]["figures"][0]["tok/s"] == {"median": 2.0, "low": 1.0, "high": 3.0, "runs": 3}
    assert found["targets"] == [{"what": "idle", "value": 0.5, "bound": 0.02, "sense": "<=", "met": False}]
