"""`sluice simulate`: from files to files, and one clear line for what is wrong."""

import json
from pathlib import Path

import pytest

from gateway.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    entries = [{"timestamp": 100 * n, "input_length": 20 + n, "output_length": 4 + n % 9} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_it_prints_the_comparison_and_writes_the_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "png")}
    flags = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    status = main(["simulate", "--trace", str(trace), "--load", "1.2", "--tenants", "3", "--compare", "fcfs",
                   "--flood", "noisy:5@1+2", "--seeds", "2", *flags])  # fmt: skip
    assert status == 0
    assert "goodput" in capsys.readouterr().out
    assert [policy["name"] for policy in json.loads(files["json"].read_text())["policies"]] == ["fair", "fcfs"]
    assert "<svg" in files["html"].read_text() and files["png"].read_bytes().startswith(b"\x89PNG")


def test_a_policy_file_is_a_policy_and_so_is_its_edit(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("policy.yaml", "edited.yaml")]
    text = "classes: {only: {ttft: 20ms, when_late: %s}}\ntenants: {heavy: {weight: 1}, light: {weight: 3}}\n"
    for file, late in zip(files, ("wait", "refuse"), strict=True):
        file.write_text(text % late)
    traffic = ["--trace", str(trace), "--load", "3", "--tenants", "heavy:0.8,light:0.2"]
    report = tmp_path / "report.json"
    flags = ["--policy", str(files[0]), "--compare", str(files[1]), "--json", str(report)]
    assert main(["simulate", *traffic, *flags]) == 0
    waiting, refusing = (policy["runs"][0] for policy in json.loads(report.read_text())["policies"])
    assert not waiting["refusals"] and sum(refusing["refusals"].values()) > 0
    assert {tenant["name"]: tenant["weight"] for tenant in waiting["tenants"]} == {"heavy": 1, "light": 3}
    files[1].write_text("classs: {}")
    assert main(["simulate", *traffic, *flags]) == 2
    assert "edited.yaml:1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "lottery"], "--policy: must be one of fair"),
        (["--tenants", "0"], "--tenants: the number of tenants"),
        (["--flood", "x"], "--flood"),
        (["--rate", "-1"], "a number above 0"),
        (["--rate", "1", "--load", "1"], "not allowed with"),
        (["--html", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["--device", "abacus"], "--device: must be one of"),
        (["--compare", "fcfs"] * 4, "at most 4 policies"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_one_line(
    trace: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["simulate", "--trace", str(trace), *flags])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_broken_trace_is_named_with_its_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + "\n{")
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert f"{trace}, line 61: not JSON" in capsys.readouterr().err
