import json
from pathlib import Path

import pytest

from admission.step_times.step_time import StepWork
from labs.simulation.device import DEVICES, find_device
from labs.simulation.errors import OptionError
from labs.simulation.host import NO_TIME, HostTime
from tests.labs.simulation.runs import DEVICE


def test_the_device_takes_the_published_time_on_either_side_of_its_knee() -> None:
    small = StepWork(prefill_tokens=100, decode_tokens=20, decode_context=5000, prefill_context=300)
    large = StepWork(prefill_tokens=600, decode_tokens=20, decode_context=5000, prefill_context=300)
    micro = 1e6 * DEVICE.seconds(small), 1e6 * DEVICE.seconds(large)
    assert micro[0] == pytest.approx(14936 + 8130 + 1904 + 555 + 226.5)
    assert micro[1] == pytest.approx(5004 + 57480 - 284 + 830 + 819)


def test_the_published_device_is_the_one_that_is_named() -> None:
    assert list(DEVICES) == ["llama3-8b-a100"]


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
        with pytest.raises(OptionError, match="llama3-8b-a100 or a JSON file"):
            find_device(name)
