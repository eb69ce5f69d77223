import json
from pathlib import Path

import pytest

from tests.gateway.cli.conftest import Printed, Sluice


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    entries = [{"timestamp": 120 * n, "input_length": 300 + n, "output_length": 40 + n % 9} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_it_prints_flags_that_serve_takes_and_what_they_gain(trace: Path, printed: Printed, sluice: Sluice) -> None:
    out = printed("tune", "--trace", trace, "--policy", "fair,max_num_seqs=2", "--budget", 8)
    flags, gain = out.strip().splitlines()[-2:]
    assert flags.startswith("--max-num-seqs ") and "points of goodput" in gain
    named = dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
    assert int(named["--max-num-seqs"]) > 2
    assert sluice("serve", *flags.split(), "--help").status == 0


def test_settings_that_cannot_be_bettered_are_kept(trace: Path, printed: Printed) -> None:
    out = printed("tune", "--log", trace, "--speedup", 0.1, "--budget", 4)
    assert "keep the present settings" in out


@pytest.mark.parametrize(
    ("flags", "message"), [(["--budget", "3"], "from 4 to 10000"), (["--compare", "fcfs"], "--compare")]
)
def test_impossible_flags_are_refused(trace: Path, sluice: Sluice, flags: list[str], message: str) -> None:
    done = sluice("tune", "--trace", trace, *flags)
    assert done.status == 2 and message in done.err
