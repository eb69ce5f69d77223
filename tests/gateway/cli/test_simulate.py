"""`sluice simulate`: from files to files, and one clear line for what is wrong."""

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from admission.core import PRIOR, CoreConfig, Order, Overload
from admission.event_log import make_logged_core
from admission.scheduling_policy import SchedulingPolicy
from admission.simulation.arrival import Arrival, ClassTarget
from admission.simulation.device import DEVICES
from admission.simulation.loop import Loop
from admission.simulation.recorder import Objective, Recorder
from admission.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from gateway.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    entries = [{"timestamp": 100 * n, "input_length": 20 + n, "output_length": 4 + n % 9} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_it_prints_the_comparison_and_writes_the_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html")}
    flags = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    status = main(["simulate", "--trace", str(trace), "--load", "1.2", "--tenants", "3", "--compare", "fcfs",
                   "--flood", "noisy:5@1+2", "--seeds", "2", *flags])  # fmt: skip
    assert status == 0
    assert "goodput" in capsys.readouterr().out
    assert [policy["name"] for policy in json.loads(files["json"].read_text())["policies"]] == ["fair", "fcfs"]
    assert "<svg" in files["html"].read_text()


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


def test_the_load_is_of_that_part_of_the_trace_which_is_used(tmp_path: Path) -> None:
    """Its first half comes ten times as fast as the other, and is as long in tokens."""
    trace, half = tmp_path / "t.jsonl", tmp_path / "half.jsonl"
    times = [*range(0, 3000, 100), *range(4000, 34000, 1000)]
    lines = [json.dumps({"timestamp": time, "input_length": 100, "output_length": 9}) for time in times]
    trace.write_text("\n".join(lines))
    half.write_text("\n".join(lines[:30]))
    reports = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip((trace, half), reports, strict=True):
        assert main(["simulate", "--trace", str(path), "--requests", "30", "--load", "1.5", "--json", str(report)]) == 0
    one, other = (json.loads(report.read_text())["policies"] for report in reports)
    assert one == other


def test_files_of_one_name_are_told_apart_by_their_folders(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / folder / "policy.yaml" for folder in ("now", "edited")]
    for file in files:
        file.parent.mkdir()
        file.write_text("tenants: {heavy: {weight: 1}}")
    assert main(["simulate", "--trace", str(trace), "--policy", str(files[0]), "--compare", str(files[1])]) == 0
    printed = capsys.readouterr().out
    assert all(str(file) in printed for file in files)


@pytest.mark.parametrize("rows", [["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.1,374,44"], None])
def test_a_compressed_trace_is_read_whatever_its_name(rows: list[str] | None, trace: Path, tmp_path: Path) -> None:
    if rows is not None:
        trace.write_text("\n".join(rows))
    compressed, reports = tmp_path / "compressed", [tmp_path / "a.json", tmp_path / "b.json"]
    compressed.write_bytes(gzip.compress(trace.read_bytes()))
    for path, report in zip((trace, compressed), reports, strict=True):
        assert main(["simulate", "--trace", str(path), "--json", str(report)]) == 0
    plain, packed = (json.loads(report.read_text())["policies"] for report in reports)
    assert plain == packed


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:40] + b"\xff" * 40 + data[80:]])
def test_a_compressed_trace_that_is_damaged_is_said_in_one_line(
    damage: Callable[[bytes], bytes], trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace.write_bytes(damage(gzip.compress(trace.read_bytes())))
    monkeypatch.chdir(trace.parent)  # a long path is cut where it is repeated
    assert main(["simulate", "--trace", trace.name]) == 2
    printed = capsys.readouterr().err
    assert "--trace: cannot be read (" in printed and f"got '{trace.name}'" in printed and printed.count("\n") == 1


def test_names_of_wide_characters_do_not_move_the_columns(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(trace), "--tenants", "東京支社:1,acme:1,Zu\u0308rich:1"]) == 0
    *_, header, first, second, third = capsys.readouterr().out.rstrip().split("\n")
    columns = [line + "".join(" " * (character in "東京支社") for character in line) for line in (first, second, third)]
    assert {len(line.replace("\u0308", "")) for line in columns} == {len(header)}


def test_an_ordering_is_meant_even_where_a_file_is_called_so(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trace.parent)
    Path("fcfs").write_text("classs: {}")
    assert main(["simulate", "--trace", str(trace), "--policy", "fcfs"]) == 0
    assert main(["simulate", "--trace", str(trace), "--policy", "./fcfs"]) == 2
    assert "fcfs:1:1" in capsys.readouterr().err


def test_what_was_refused_is_told_by_its_reason(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", "overload=bounded,max_waiting=2,max_num_seqs=1", "--speedup", "20"]
    assert main(["simulate", "--trace", str(trace), *flags]) == 0
    assert "refused: QueueFull" in capsys.readouterr().out


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a slow machine with two slots: two requests that fill them, one that waits, one too many. Cut off, rotated."""
    lines: list[str] = []
    engine = EngineConfig(num_blocks=64, max_model_len=512, max_num_seqs=2)
    config = CoreConfig(max_waiting=1, overload=Overload.BOUNDED)
    core = make_logged_core(config, engine, StepTimeModel(PRIOR), lines.append)[0]
    slow = replace(DEVICES["llama3-8b-a100"], seconds=lambda _: 0.02)
    arrivals = [Arrival(0.1 * n, 20, 200, tenant="acme", max_tokens=200) for n in range(4)]
    Loop(core, slow, Recorder(slow, Objective(), {}), 512).run(arrivals)
    path = tmp_path / "events.log"
    Path(f"{path}.1").write_text("".join(f"{line}\n" for line in lines[:9]))
    path.write_text("".join(f"{line}\n" for line in lines[9:]) + '["plan",99')
    return path


def test_an_event_log_is_simulated_on_the_machine_that_recorded_it(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, report = tmp_path / "policy.yaml", tmp_path / "report.json"
    policy.write_text("tenants: {acme: {weight: 2}}")
    flags = ["--policy", str(policy), "--compare", "max_num_seqs=4", "--json", str(report)]
    assert main(["simulate", "--trace", str(log), *flags]) == 0
    as_it_was, wider = json.loads(report.read_text())["policies"]
    assert (as_it_was["engine"]["num_blocks"], as_it_was["engine"]["max_num_seqs"]) == (64, 2)
    assert as_it_was["core"]["max_waiting"] == 1 and as_it_was["runs"][0]["refusals"] == {"QueueFull": 1}
    assert as_it_was["runs"][0]["interval"]["p50"] == pytest.approx(0.02, rel=0.1)
    assert wider["engine"]["max_num_seqs"] == 4 and not wider["runs"][0]["refusals"]
    assert "device as recorded" in capsys.readouterr().out


def test_an_event_log_without_a_policy_is_simulated_as_it_was_recorded(tmp_path: Path) -> None:
    """Nobody is served later than promised there, from the first request on: the step times were known."""
    lines: list[str] = []
    engine = EngineConfig(num_blocks=64, max_model_len=512, max_num_seqs=2)
    config = CoreConfig(order=Order.VTC, confidence=0.6)
    times = StepTime((0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    slow = replace(DEVICES["llama3-8b-a100"], seconds=times.seconds)
    core = make_logged_core(config, engine, StepTimeModel(times, 100), lines.append)[0]
    core.policy_changed(SchedulingPolicy(weights={"acme": 3.0}, offsets=(0.0, 4.0)), 0.0)
    recorder, target = Recorder(slow, Objective(), {}), ClassTarget(first_token=1.5, interval=0.5, refuses=True)
    spacing = 0.307  # but for the first, none comes as a step ends: a fitted time cannot tell which was sooner
    arrivals = [Arrival(spacing * n, 20, 9 + n % 4, tenant="acme", max_tokens=12) for n in range(40)]
    Loop(core, slow, recorder, 512, target=lambda _: target).run(arrivals)
    log, reports = tmp_path / "events.log", [tmp_path / "a.json", tmp_path / "b.json"]
    log.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    entries = [json.loads(line) for line in lines]
    refused = sum(entry[0] == "arrive" and entry[-1] is not None for entry in entries)
    completed = sum(len(entry[4]) + len(entry[5]) for entry in entries if entry[0] == "done")
    for flags, report in zip(([], ["--policy", "order=vtc"]), reports, strict=True):
        assert main(["simulate", "--trace", str(log), *flags, "--json", str(report)]) == 0
        (policy,) = json.loads(report.read_text())["policies"]
        (run,) = policy["runs"]
        assert policy["core"] == asdict(config) and policy["engine"] == asdict(engine)
        assert run["refusals"] == {"DeadlineUnmeetable": refused} and run["completed"] == completed > 5
        assert [tenant["weight"] for tenant in run["tenants"]] == [3.0]
    assert [json.loads(report.read_text())["policies"][0]["name"] for report in reports] == ["as recorded", "order=vtc"]
    other = ["--compare", "weights=acme:5,seconds_per_class=1"]
    assert main(["simulate", "--trace", str(log), *other, "--json", str(reports[0])]) == 0
    runs = [policy["runs"][0] for policy in json.loads(reports[0].read_text())["policies"]]
    assert [run["tenants"][0]["weight"] for run in runs] == [3.0, 5.0]


def test_an_event_log_can_be_simulated_on_another_device(log: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["simulate", "--trace", str(log), "--device", "llama3-8b-a100", "--json", str(report)]) == 0
    (policy,) = json.loads(report.read_text())["policies"]
    assert policy["engine"]["max_num_seqs"] > 2 and not policy["runs"][0]["refusals"]


def test_a_device_on_which_work_costs_nothing_shares_its_steps_evenly(trace: Path, tmp_path: Path) -> None:
    device, report = tmp_path / "flat.json", tmp_path / "report.json"
    device.write_text(json.dumps({"coefficients": [0.01, 0, 0, 0, 0, 0, 0], "kv_tokens": 5000}))
    flags = ["--device", str(device), "--tenants", "3", "--json", str(report)]
    assert main(["simulate", "--trace", str(trace), *flags]) == 0
    (policy,) = json.loads(report.read_text())["policies"]
    assert sum(tenant["time_share"] for tenant in policy["runs"][0]["tenants"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "lottery"], "--policy: must be one of fair"),
        (["--tenants", "0"], "--tenants: the number of tenants"),
        (["--flood", "x"], "--flood"),
        (["--rate", "-1"], "a number above 0"),
        (["--rate", "1", "--load", "1"], "not allowed with"),
        (["--html", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["--png", "x.png"], "charts are drawn on the page of --html FILE"),
        (["--device", "abacus"], "--device: must be one of"),
        (["--compare", ""], "--compare: must be one of fair"),
        (["--policy", "no/such"], "no/such"),
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


EDITS = {
    "highest_class": ("highest_class: interactive", "highest_class: batch"),
    "default_class": ("default_class: standard", "default_class: batch"),
    "requests": ("limits: {requests: 1M/s}", "limits: {requests: 2/s}"),
    "concurrent_requests": ("limits: {concurrent_requests: 1000}", "limits: {concurrent_requests: 1}"),
}


@pytest.mark.parametrize("field", EDITS)
def test_what_an_edit_changes_is_said_first_and_shows_in_the_figures(
    field: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "policy.yaml", tmp_path / "edited.yaml"]
    for file, text in zip(files, EDITS[field], strict=True):
        file.write_text(f"defaults: {{{text}}}")
    report = tmp_path / "report.json"
    flags = ["--policy", str(files[0]), "--compare", str(files[1]), "--json", str(report)]
    assert main(["simulate", "--trace", str(trace), "--load", "2", *flags]) == 0
    before, after = (policy["runs"] for policy in json.loads(report.read_text())["policies"])
    assert before != after
    first, *lines = capsys.readouterr().out.split("\n")
    assert first == "policy.yaml -> edited.yaml" and any(f"{field}: " in line for line in lines[:3])
    assert json.loads(report.read_text())["remarks"][0] == first


def test_what_of_an_edit_is_not_simulated_is_said_with_its_line(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "policy.yaml", tmp_path / "edited.yaml"]
    classes = "classes:\n  first: {}\n  second:\n    service_tiers: [%s]\n"
    for file, tier in zip(files, ("flex", "priority"), strict=True):
        file.write_text(classes % tier)
    flags = ["--trace", str(trace), "--policy", str(files[0]), "--compare", str(files[1])]
    assert main(["simulate", *flags]) == 0
    said = f"not simulated: classes.second.service_tiers at {files[1]}:4: the trace has no service tiers"
    assert said in capsys.readouterr().out
    assert main(["simulate", *flags, "--service-tiers", "flex:0.5,none:0.5"]) == 0
    printed = capsys.readouterr().out
    assert "not simulated" not in printed and "classes under policy.yaml" in printed


def test_a_trace_that_asks_for_more_than_the_device_can_do_says_how_much(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", str(trace), "--load", "3"]) == 0
    told = capsys.readouterr().out.split("\n")[0]
    assert told.startswith("overload: the requests ask for ") and "times what llama3-8b-a100 can serve" in told
    slower = told.partition("use --speedup ")[2].split(",")[0]
    assert main(["simulate", "--trace", str(trace), "--speedup", slower]) == 0
    assert "overload" not in capsys.readouterr().out


def test_policies_are_judged_by_their_own_targets_unless_one_states_none(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, report = tmp_path / "policy.yaml", tmp_path / "report.json"
    policy.write_text("classes: {only: {ttft: 1ms}}")
    flags = ["--trace", str(trace), "--policy", str(policy), "--json", str(report)]
    goodput = []
    for more in ([], ["--compare", "fcfs"], ["--good-first-token", "5"]):
        assert main(["simulate", *flags, *more]) == 0
        goodput.append(json.loads(report.read_text())["policies"][0]["runs"][0]["goodput"])
    assert goodput[0] == 0 < min(goodput[1:])
