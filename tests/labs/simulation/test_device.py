import json
from pathlib import Path

import pytest

from admission.step_times.step_time import StepWork, prefill_pairs
from labs.simulation.device import DEVICES, find_device
from labs.simulation.errors import OptionError
from labs.simulation.host import NO_TIME, HostTime
from tests.labs.simulation.runs import DEVICE

ROOT = Path(__file__).parents[3]


def test_the_device_takes_the_published_time_on_either_side_of_its_knee() -> None:
    small = StepWork(prefill_tokens=100, decode_tokens=20, decode_context=5000, prefill_context=300)
    large = StepWork(prefill_tokens=600, decode_tokens=20, decode_context=5000, prefill_context=300)
    micro = 1e6 * DEVICE.seconds(small), 1e6 * DEVICE.seconds(large)
    assert micro[0] == pytest.approx(14936 + 8130 + 1904 + 555 + 226.5)
    assert micro[1] == pytest.approx(5004 + 57480 - 284 + 830 + 819)


@pytest.mark.parametrize(
    ("name", "shape", "day"),
    [("llama3-8b-h200", "Llama-3-8B", "2026-11-26"), ("qwen3-0.6b-h200", "Qwen3-0.6B", "2026-11-27")],
)
def test_a_device_that_was_measured_takes_what_it_took(name: str, shape: str, day: str) -> None:
    found = json.loads((ROOT / f"labs/benchmarks/results/gpu/nvidia-h200-{day}.json").read_text(encoding="utf-8"))
    took = {finding["what"]: finding["value"] for part in found["parts"] for finding in part["findings"]}
    works = {
        f"decode, batch {rows}, context 1,024: step": StepWork(decode_tokens=rows, decode_context=1024 * rows)
        for rows in (1, 64, 256)
    }
    for tokens in (1024, 8000):
        works[f"prefill of {tokens:,}"] = StepWork(tokens, prefill_pairs=prefill_pairs(0, tokens))
    both = StepWork(400, 100, 102_400, prefill_pairs=prefill_pairs(0, 400))
    works["100 decodes, context 1,024, and prefill of 400: step"] = both
    for what, work in works.items():
        assert 1e3 * DEVICES[name].seconds(work) == pytest.approx(took[f"{shape}: {what}"], rel=0.08), what


def test_a_device_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    said = {"coefficients": [0.01, 1e-4, 0, 0, 0, 0, 1e-3], "knee": 100, "kv_tokens": 5000}
    path.write_text(json.dumps(said))
    device = find_device(str(path))
    assert (device.name, device.kv_tokens, device.host) == ("mine", 5000, NO_TIME)
    path.write_text(json.dumps(said | {"host": {"step": 1e-3, "request": 2e-3}}))
    assert find_device(str(path)).host == HostTime(step=1e-3, request=2e-3)
    assert device.seconds(StepWork(prefill_tokens=101)) == pytest.approx(0.01 + 0.0101 + 0.001)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "nonsense",
        '{"coefficients": [1, 2], "kv_tokens": 5}',
        '{"coefficients": [0, 0, 0, 0, 0, 0, 0], "kv_tokens": 5, "host": {"steps": 1}}',
    ],
)
def test_a_device_that_cannot_be_read_says_what_would_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    for name in (str(path), str(tmp_path / "missing")):
        with pytest.raises(OptionError, match=r"qwen3-0\.6b-h200 or a JSON file"):
            find_device(name)
