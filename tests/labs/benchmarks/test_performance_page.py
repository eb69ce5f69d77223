import json
import re
from pathlib import Path

from labs.benchmarks.performance_page import PAGE, page
from labs.benchmarks.report import RESULTS

README = Path(__file__).parents[3] / "README.md"


def test_the_page_says_what_the_results_say() -> None:
    assert PAGE.read_text() == page(), "run python -m labs.benchmarks.performance_page"


def test_misses_come_first_and_none_is_left_out(tmp_path: Path) -> None:
    machine = {"cpu": "a processor", "commit": "abc", "load average": "0.1 0.1 0.1"}
    targets = [
        {"what": f"figure {n}", "value": n, "bound": 50, "sense": "<=", "met": n <= 50}
        for n in (*range(40), *range(90, 99))
    ]
    report = {"scenario": "front", "measured_at": "2026-11-28T00:00:00", "machine": machine, "targets": targets}
    (tmp_path / "front.json").write_text(json.dumps(report))
    missed, everything = page(tmp_path).split("## Every result")
    assert "## Missed: 9 of 49 targets" in missed
    assert re.findall(r"figure (\d+) ", missed) == re.findall(r"figure (\d+) .*\*\*missed\*\*", everything)
    assert len(re.findall(r"figure \d+ .*\*\*missed\*\*", everything)) == 9
    (tmp_path / "front.quick.json").write_text(json.dumps(report))
    assert page(tmp_path) == f"{missed}## Every result{everything}", "quick runs judge nothing"
    assert "40 of 49 met" in everything and "and 32 more that are met" in everything


def test_the_figures_in_the_readme_are_of_the_last_visit_to_a_gpu() -> None:
    claimed = re.search(r"([\d,]+) output\s+tokens/s of Qwen3-0.6B \(vLLM: ([\d,]+)\)", README.read_text())
    assert claimed is not None
    figures: dict[str, float] = {}  # of each the last visit's
    for visit in sorted((RESULTS / "gpu").glob("nvidia-*.json")):
        findings = [finding for part in json.loads(visit.read_text())["parts"] for finding in part["findings"]]
        figures |= {finding["what"]: finding["value"] for finding in findings}
    ours = figures["Qwen3-0.6B, 256 requests, offline: output tokens/s"]
    theirs = next(value for what, value in figures.items() if what.endswith("tokens: vLLM"))
    assert [int(text.replace(",", "")) for text in claimed.groups()] == [round(ours, -2), round(theirs, -1)]


def test_the_figure_of_the_noisy_neighbour_in_the_readme_is_the_recorded_one() -> None:
    claimed = re.search(r"came (\d+) times as soon as from vLLM behind LiteLLM", README.read_text())
    targets = json.loads((RESULTS / "noisy_peers.json").read_text())["targets"]
    [sooner] = [target["value"] for target in targets if target["what"].endswith("times sooner")]
    assert claimed is not None and int(claimed[1]) == round(sooner)
