"""Policies and devices as they are written on a command line."""

import json
from pathlib import Path

import pytest

from admission.core import Order, Unit
from admission.simulation.device import find_device
from admission.simulation.errors import OptionError
from admission.simulation.policy import parse_simulated_policy
from admission.step_time import StepWork
from tests.admission.simulation.runs import DEVICE


def test_an_ordering_alone_is_a_policy() -> None:
    policy = parse_simulated_policy("fcfs", DEVICE)
    assert policy.core.order is Order.FCFS and policy.name == "fcfs"
    assert policy.engine.num_blocks * policy.engine.block_size == DEVICE.kv_tokens


def test_settings_of_the_core_and_of_the_engine_go_where_they_belong() -> None:
    policy = parse_simulated_policy("fair,unit=tokens,quantum=512,weights=gold:4+a:b:2,prefill_chunk=off,kv_tokens=512,"
                          "max_num_batched_tokens=512", DEVICE)  # fmt: skip
    assert policy.core.unit is Unit.TOKENS and policy.core.quantum == 512
    assert policy.core.weights == {"gold": 4.0, "a:b": 2.0}
    assert policy.engine.prefill_chunk is None and policy.engine.num_blocks == 32 and policy.engine.max_model_len == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantun=1", "there is no setting quantun: did you mean quantum?"),
        ("fair,leeway=1", "leeway is now called deadline_debt_limit"),
        ("fair,order=fcfs", "order is set twice"),
        ("lottery", "must be one of fair, fcfs"),
        ("quantum=fast", "must be a number"),
        ("quantum=-1", "quantum must be above 0"),
        ("max_num_seqs=1.5", "must be a whole number"),
        ("max_num_seqs=4096", "max_num_seqs 4096 exceeds max_num_batched_tokens"),
        ("weights=gold", "write TENANT:WEIGHT"),
        ("kv_tokens=much", "must be a whole number"),
    ],
)
def test_a_policy_that_makes_no_sense_names_the_option_and_the_setting(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_simulated_policy(text, DEVICE, "--compare")
    assert str(error.value).startswith("--compare: ") and message in str(error.value)


def test_a_device_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"coefficients": [0.01, 1e-4, 0, 0, 0, 0, 1e-3], "knee": 100, "kv_tokens": 5000}))
    device = find_device(str(path))
    assert (device.name, device.kv_tokens) == ("mine", 5000)
    assert device.seconds(StepWork(prefill_tokens=101)) == pytest.approx(0.01 + 0.0101 + 0.001)


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"coefficients": [1, 2], "kv_tokens": 5}'])
def test_a_device_that_cannot_be_read_says_what_would_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    for name in (str(path), str(tmp_path / "missing")):
        with pytest.raises(OptionError, match="llama3-8b-a100 or a JSON file"):
            find_device(name)
