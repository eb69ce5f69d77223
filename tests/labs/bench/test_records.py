import json
from pathlib import Path
from typing import Any

import pytest

from labs.bench.records import read_record
from labs.simulation.errors import OptionError


def spread(mean: float, **more: Any) -> dict[str, Any]:
    return {"mean": mean, "median": mean, "count": 7, "percentiles": {"p95": 2 * mean, "p99": 3 * mean}, **more}


def stats(unit: str, mean: float) -> dict[str, Any]:
    return {"unit": unit, "avg": mean, "p50": mean, "p95": 2 * mean, "p99": 3 * mean, "count": 7}


GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                "time_to_first_token_ms": {"successful": spread(100.0)},
                "inter_token_latency_ms": {"successful": spread(50.0)},
                "request_latency": {"successful": spread(3.0)},
            }
        }
    ]
}
AIPERF = {
    "time_to_first_token": stats("ms", 100.0),
    "inter_token_latency": stats("us", 50_000.0),
    "request_latency": stats("sec", 3.0),
}
VLLM = {"completed": 7} | {
    f"{what}_{name}_ms": times * mean
    for name, mean in (("ttft", 100.0), ("tpot", 50.0), ("e2el", 3000.0))
    for what, times in (("mean", 1), ("median", 1), ("p95", 2), ("p99", 3))
}


@pytest.mark.parametrize(("tool", "said"), [("guidellm", GUIDELLM), ("AIPerf", AIPERF), ("vllm bench", VLLM)])
def test_the_result_of_another_tool_is_read_in_seconds(tmp_path: Path, tool: str, said: object) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(said))
    found = read_record(path)
    assert found.tool == tool
    for latency, mean in ((found.ttft, 0.1), (found.per_token, 0.05), (found.total, 3.0)):
        assert [latency.mean, latency.p50, latency.p95, latency.p99] == pytest.approx([mean, mean, 2 * mean, 3 * mean])
        assert latency.count == 7


def test_what_a_tool_did_not_measure_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"request_latency": {"unit": "ms", "avg": 5}}))
    found = read_record(path)
    assert (found.ttft.mean, found.total.mean, found.total.p99) == (None, 0.005, None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"benchmarks": []}', '{"mean_ttft_ms": 1}', '{"request_latency": 1}']
)
def test_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"--beside: (cannot be read|is no result of guidellm)"):
        read_record(path)
