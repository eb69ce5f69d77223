import json
from pathlib import Path

import pytest

from tests.gateway.cli.conftest import Printed, Sluice


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    entries = [{"timestamp": 120 * n, "input_length": 900 + n, "output_length": 30 + n % 9} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_a_load_that_no_trace_can_have_is_named_as_it_was_given(sluice: Sluice, tmp_path: Path) -> None:
    trace = tmp_path / "same.jsonl"
    trace.write_text(2 * '{"timestamp": 0, "input_length": 10, "output_length": 10}\n')
    refused = sluice("pools", "--trace", trace, "--load", 0.5)
    assert refused.status and "--load: the trace has no length in time" in refused.err and "got 0.5" in refused.err


def test_it_compares_every_split_and_says_whether_apart_pays(trace: Path, printed: Printed) -> None:
    out = printed("pools", "--trace", trace, "--devices", 3)
    assert all(split in out for split in ("3 together", "1 prefill, 2 decode", "2 prefill, 1 decode"))
    assert "3 devices · links of 100 Gb/s" in out
    assert out.strip().splitlines()[-1].startswith(("keep them together", "setting devices apart pays here"))


def test_one_split_beside_as_many_devices_together(trace: Path, printed: Printed) -> None:
    out = printed("pools", "--trace", trace, "--split", "1:2", "--link-gbps", 25)
    assert "3 devices · links of 25 Gb/s" in out and "3 together" in out and "1 prefill, 2 decode" in out
    assert "2 prefill, 1 decode" not in out
    assert all(column in out for column in ("first token in time", "tokens in time", "good a second and device"))


def test_a_sweep_names_the_largest_load_of_each_split(trace: Path, printed: Printed) -> None:
    out = printed("pools", "--trace", trace, "--devices", 2, "--sweep", "0.5:1:2", "--good-per-token", 0.03)
    assert "largest load with 90.0 % good" in out and "1 prefill, 1 decode" in out
    assert "good requests a second and device at it" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "1"], "from 2 to 64"),
        (["--link-gbps", "0"], "above 0"),
        (["--split", "0:4"], "two whole numbers above 0"),
        (["--split", "60:5"], "of 64 devices in all"),
        (["--split", "1:3", "--devices", "5"], "not allowed with"),
        (["--seeds", "2"], "no effect"),
        (["--load", "0.5", "--sweep", "0.5:1"], "not allowed with"),
    ],
)
def test_impossible_flags_are_refused(trace: Path, sluice: Sluice, flags: list[str], message: str) -> None:
    done = sluice("pools", "--trace", trace, *flags)
    assert done.status == 2 and message in done.err
