import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from admission.core import PRIOR_STEP_TIME, CoreConfig, Overload
from admission.event_logs.event_log import make_logged_core
from admission.scheduling_policy import SchedulingPolicy
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig
from labs.simulation.arrival import Arrival, ClassTarget
from labs.simulation.device import DEVICES
from labs.simulation.loop import Loop
from labs.simulation.recorder import Objective, Recorder
from tests.gateway.cli.conftest import Printed, Sluice


class Simulated(NamedTuple):
    out: str
    report: dict[str, Any]

    @property
    def policies(self) -> list[dict[str, Any]]:
        policies: list[dict[str, Any]] = self.report["policies"]
        return policies

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The first of each policy."""
        return [policy["runs"][0] for policy in self.policies]


Simulate = Callable[..., Simulated]


def as_json(config: EngineConfig) -> object:
    return json.loads(json.dumps(asdict(config)))


@pytest.fixture
def simulate(printed: Printed, tmp_path: Path) -> Simulate:
    def run(trace: Path, *flags: object) -> Simulated:
        out = printed("simulate", "--trace", trace, *flags, "--json", tmp_path / "report.json")
        return Simulated(out, json.loads((tmp_path / "report.json").read_text()))

    return run


def written(*texts: tuple[Path, str]) -> list[Path]:
    for path, text in texts:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [path for path, _ in texts]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    entries = [{"timestamp": 100 * n, "input_length": 20 + n, "output_length": 4 + n % 9} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_it_prints_the_comparison_and_writes_the_files(trace: Path, tmp_path: Path, simulate: Simulate) -> None:
    flags = ["--load", "1.2", "--tenants", "3", "--compare", "fcfs", "--flood", "noisy:5@1+2", "--seeds", "2"]
    done = simulate(trace, *flags, "--html", tmp_path / "report.html")
    assert "goodput" in done.out
    assert [policy["name"] for policy in done.policies] == ["fair", "fcfs"]
    assert "All figures" in (tmp_path / "report.html").read_text()


def test_assumed_declarations_are_told(trace: Path, simulate: Simulate) -> None:
    assert "max_tokens 1,024, of which the trace says nothing" in simulate(trace).out
    assert "of which the trace says nothing" not in simulate(trace, "--max-tokens", 64).out
    small = simulate(trace, "--policy", "fair,max_model_len=128,kv_tokens=2048")
    assert small.runs[0]["completed"] == 60


def test_a_cache_that_is_off_or_larger_is_compared(tmp_path: Path, simulate: Simulate) -> None:
    path = tmp_path / "conversations.jsonl"
    told = [{"timestamp": 9000 * n, "hash_ids": [n % 5, 5 + n // 5, *([n + 100] * (n % 2))]} for n in range(30)]
    lengths = {"input_length": 1024, "output_length": 4}
    path.write_text("\n".join(json.dumps(one | lengths) for one in told))
    flags = ["--policy", "kv_tokens=2048", "--compare", "kv_tokens=100000", "--compare", "prefix_cache=off"]
    done = simulate(path, *flags, "--html", tmp_path / "page.html")
    small, large, off = (run["hit_rate"] for run in done.runs)
    assert 0 == off <= small < large
    assert "prompt tokens cached" in done.out and "prompt tokens cached" in (tmp_path / "page.html").read_text()


def test_a_policy_file_is_a_policy_and_so_is_its_edit(
    trace: Path, tmp_path: Path, simulate: Simulate, sluice: Sluice
) -> None:
    text = "classes: {only: {ttft: 20ms, when_late: %s}}\ntenants: {heavy: {weight: 1}, light: {weight: 3}}\n"
    files = written((tmp_path / "policy.yaml", text % "wait"), (tmp_path / "edited.yaml", text % "refuse"))
    flags = ["--load", "3", "--tenants", "heavy:0.8,light:0.2", "--policy", files[0], "--compare", files[1]]
    waiting, refusing = simulate(trace, *flags).runs
    assert not waiting["refusals"] and sum(refusing["refusals"].values()) > 0
    assert {tenant["name"]: tenant["weight"] for tenant in waiting["tenants"]} == {"heavy": 1, "light": 3}
    files[1].write_text("classs: {}")
    done = sluice("simulate", "--trace", trace, *flags)
    assert (done.status, "edited.yaml:1:1" in done.err) == (2, True)


def test_a_policy_file_is_tried_with_more_memory(trace: Path, tmp_path: Path, simulate: Simulate) -> None:
    (file,) = written((tmp_path / "policy.yaml", "defaults: {limits: {concurrent_requests: 20}}"))
    done = simulate(trace, "--load", "2", "--policy", file, "--compare", f"{file},kv_tokens=200,max_model_len=100")
    assert [policy["name"] for policy in done.policies] == [
        "policy.yaml",
        "policy.yaml,kv_tokens=200,max_model_len=100",
    ]
    assert "policy.yaml -> policy.yaml,kv_tokens=200,max_model_len=100\n  settings: none -> kv_tokens=200" in done.out
    large, small = done.runs
    assert small["first_token"]["p99"] > large["first_token"]["p99"]
    assert small["refusals"].keys() == large["refusals"].keys() == {"concurrent_requests"}, "both have its limits"


def test_floors_that_leave_no_room_are_refused_as_a_server_refuses_them(
    trace: Path, tmp_path: Path, sluice: Sluice
) -> None:
    (file,) = written((tmp_path / "policy.yaml", "tenants: {a: {prefix_cache: {floor: 50GiB}}}"))
    done = sluice("simulate", "--trace", trace, "--compare", file)
    assert done.status == 2
    assert "--compare: tenants.a.prefix_cache.floor: floors keep 50.00 GiB (25,600 blocks) in all" in done.err
    assert sluice("simulate", "--trace", trace, "--compare", f"{file},kv_tokens=1000000").status == 0


def test_the_load_is_of_that_part_of_the_trace_which_is_used(tmp_path: Path, simulate: Simulate) -> None:
    """Its first half comes ten times as fast as the other, and is as long in tokens."""
    trace, half = tmp_path / "t.jsonl", tmp_path / "half.jsonl"
    times = [*range(0, 3000, 100), *range(4000, 34000, 1000)]
    lines = [json.dumps({"timestamp": time, "input_length": 100, "output_length": 9}) for time in times]
    trace.write_text("\n".join(lines))
    half.write_text("\n".join(lines[:30]))
    one, other = (simulate(path, "--requests", "30", "--load", "1.5").policies for path in (trace, half))
    assert one == other


def test_files_of_one_name_are_told_apart_by_their_folders(trace: Path, tmp_path: Path, simulate: Simulate) -> None:
    text = "tenants: {heavy: {weight: 1}}"
    files = written(*((tmp_path / folder / "policy.yaml", text) for folder in ("now", "edited")))
    out = simulate(trace, "--policy", files[0], "--compare", files[1]).out
    assert all(str(file) in out for file in files)


@pytest.mark.parametrize("rows", [["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.1,374,44"], None])
def test_a_compressed_trace_is_read_under_any_name(
    rows: list[str] | None, trace: Path, tmp_path: Path, simulate: Simulate
) -> None:
    if rows is not None:
        trace.write_text("\n".join(rows))
    (tmp_path / "compressed").write_bytes(gzip.compress(trace.read_bytes()))
    assert simulate(trace).policies == simulate(tmp_path / "compressed").policies


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:40] + b"\xff" * 40 + data[80:]])
def test_a_compressed_trace_that_is_damaged_is_said_in_one_line(
    damage: Callable[[bytes], bytes], trace: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace.write_bytes(damage(gzip.compress(trace.read_bytes())))
    monkeypatch.chdir(trace.parent)  # a long path is cut where it is repeated
    done = sluice("simulate", "--trace", trace.name)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "--trace: cannot be read: " in done.err and f"got '{trace.name}'" in done.err


def test_an_ordering_is_meant_even_where_a_file_is_called_so(
    trace: Path, monkeypatch: pytest.MonkeyPatch, simulate: Simulate, sluice: Sluice
) -> None:
    monkeypatch.chdir(trace.parent)
    Path("fcfs").write_text("classs: {}")
    assert simulate(trace, "--policy", "fcfs")
    done = sluice("simulate", "--trace", trace, "--policy", "./fcfs")
    assert (done.status, "fcfs:1:1" in done.err) == (2, True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a slow machine with two slots: two requests that fill them, one that waits, one too many. Cut off, rotated."""
    lines: list[str] = []
    engine = EngineConfig(num_blocks=64, max_model_len=512, max_num_seqs=2)
    config = CoreConfig(max_waiting=1, overload=Overload.BOUNDED)
    core = make_logged_core(config, engine, StepTimeModel(PRIOR_STEP_TIME), lines.append)[0]
    slow = replace(DEVICES["llama3-8b-a100"], seconds=lambda _: 0.02)
    arrivals = [Arrival(0.1 * n, 20, 200, tenant="acme", max_tokens=200) for n in range(4)]
    Loop(core, slow, Recorder(slow, Objective(), {}), 512).run(arrivals)
    path = tmp_path / "events.log"
    Path(f"{path}.1").write_text("".join(f"{line}\n" for line in lines[:9]))
    path.write_text("".join(f"{line}\n" for line in lines[9:]) + '["plan",99')
    return path


def test_an_event_log_is_simulated_on_the_machine_that_recorded_it(
    log: Path, tmp_path: Path, simulate: Simulate
) -> None:
    (policy,) = written((tmp_path / "policy.yaml", "tenants: {acme: {weight: 2}}"))
    done = simulate(log, "--policy", policy, "--compare", "max_num_seqs=4")
    as_it_was, wider = done.policies
    assert (as_it_was["engine"]["num_blocks"], as_it_was["engine"]["max_num_seqs"]) == (64, 2)
    assert as_it_was["core"]["max_waiting"] == 1 and as_it_was["runs"][0]["refusals"] == {"QueueFull": 1}
    assert as_it_was["runs"][0]["interval"]["p50"] == pytest.approx(0.02, rel=0.1)
    assert wider["engine"]["max_num_seqs"] == 4 and not wider["runs"][0]["refusals"]
    assert "device as recorded" in done.out


def test_an_event_log_without_a_policy_is_simulated_as_it_was_recorded(tmp_path: Path, simulate: Simulate) -> None:
    """No request there is served later than promised, from the first on: the step times were known."""
    lines: list[str] = []
    engine = EngineConfig(num_blocks=64, max_model_len=512, max_num_seqs=2)
    config = CoreConfig(order="vtc", confidence=0.6)
    times = StepTime((0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    slow = replace(DEVICES["llama3-8b-a100"], seconds=times.seconds)
    core = make_logged_core(config, engine, StepTimeModel(times, 100), lines.append)[0]
    core.set_policy(SchedulingPolicy(weights={"acme": 3.0}, offsets=(0.0, 4.0)), 0.0)
    recorder, target = Recorder(slow, Objective(), {}), ClassTarget(first_token=1.5, interval=0.5, refuses=True)
    spacing = 0.307  # but for the first, none comes as a step ends: a fitted time cannot tell which was sooner
    arrivals = [Arrival(spacing * n, 20, 9 + n % 4, tenant="acme", max_tokens=12) for n in range(40)]
    Loop(core, slow, recorder, 512, target=lambda _: target).run(arrivals)
    log = tmp_path / "events.log"
    log.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    entries = [json.loads(line) for line in lines]
    refused = sum(entry[0] == "arrive" and entry[15] is not None for entry in entries)
    completed = sum(len(entry[4]) + len(entry[5]) for entry in entries if entry[0] == "done")
    for flags, name in (([], "as recorded"), (["--policy", "order=vtc"], "order=vtc")):
        (policy,) = simulate(log, *flags).policies
        (run,) = policy["runs"]
        assert policy["core"] == asdict(config) and policy["engine"] == as_json(engine) and policy["name"] == name
        assert run["refusals"] == {"DeadlineUnmeetable": refused} and run["completed"] == completed > 5
        assert [tenant["weight"] for tenant in run["tenants"]] == [3.0]
    runs = simulate(log, "--compare", "weights=acme:5,seconds_per_class=1").runs
    assert [run["tenants"][0]["weight"] for run in runs] == [3.0, 5.0]


def test_an_event_log_can_be_simulated_on_another_device(log: Path, simulate: Simulate) -> None:
    (policy,) = simulate(log, "--device", "llama3-8b-a100").policies
    assert policy["engine"]["max_num_seqs"] > 2 and not policy["runs"][0]["refusals"]


def test_a_device_on_which_work_costs_nothing_shares_its_steps_evenly(
    trace: Path, tmp_path: Path, simulate: Simulate
) -> None:
    flat = json.dumps({"coefficients": [0.01, 0, 0, 0, 0, 0, 0], "kv_tokens": 5000})
    (device,) = written((tmp_path / "flat.json", flat))
    (run,) = simulate(trace, "--device", device, "--tenants", "3").runs
    assert sum(tenant["time_share"] for tenant in run["tenants"]) == pytest.approx(1.0)


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
        (["--compare", ""], "--compare: must be one of fair"),
        (["--policy", "no/such"], "no/such"),
        (["--compare", "policies/default.yaml,weights=a:4"], "--compare: weights are set in the policy file"),
        (["--compare", "policies/default.yaml,seats=4"], "--compare: there is no setting seats"),
        (["--compare", "fcfs"] * 4, "at most 4 policies"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(trace: Path, flags: list[str], message: str, sluice: Sluice) -> None:
    done = sluice("simulate", "--trace", trace, *flags)
    assert done.status == 2
    assert message in done.err


def test_a_broken_trace_is_named_with_its_line(trace: Path, sluice: Sluice) -> None:
    trace.write_text(trace.read_text() + "\n{")
    done = sluice("simulate", "--trace", trace)
    assert (done.status, f"{trace}, line 61: not JSON" in done.err) == (2, True)


EDITS = {
    "highest_class": ("highest_class: interactive", "highest_class: batch"),
    "default_class": ("default_class: standard", "default_class: batch"),
    "requests": ("limits: {requests: 1M/s}", "limits: {requests: 2/s}"),
    "concurrent_requests": ("limits: {concurrent_requests: 1000}", "limits: {concurrent_requests: 1}"),
}


@pytest.mark.parametrize("field", EDITS)
def test_changes_of_an_edit_are_told_first_and_show_in_the_figures(
    field: str, trace: Path, tmp_path: Path, simulate: Simulate
) -> None:
    before, after = (f"defaults: {{{text}}}" for text in EDITS[field])
    files = written((tmp_path / "policy.yaml", before), (tmp_path / "edited.yaml", after))
    done = simulate(trace, "--load", "2", "--policy", files[0], "--compare", files[1])
    assert done.policies[0]["runs"] != done.policies[1]["runs"]
    first, *lines = done.out.split("\n")
    assert first == "policy.yaml -> edited.yaml" and any(f"{field}: " in line for line in lines[:3])
    assert done.report["remarks"][0] == first


def test_unsimulated_changes_are_told_with_their_lines(trace: Path, tmp_path: Path, simulate: Simulate) -> None:
    classes = "classes:\n  first: {}\n  second:\n    service_tiers: [%s]\n"
    files = written((tmp_path / "policy.yaml", classes % "flex"), (tmp_path / "edited.yaml", classes % "priority"))
    flags = ["--policy", files[0], "--compare", files[1]]
    said = f"not simulated: classes.second.service_tiers at {files[1]}:4: the trace has no service tiers"
    assert said in simulate(trace, *flags).out
    out = simulate(trace, *flags, "--service-tiers", "flex:0.5,none:0.5").out
    assert "not simulated" not in out and "classes under policy.yaml" in out


def test_a_trace_that_asks_for_more_than_the_device_can_do_says_how_much(trace: Path, simulate: Simulate) -> None:
    told = simulate(trace, "--load", "3").out.split("\n")[0]
    assert told.startswith("overload: the requests ask for ") and "times what llama3-8b-a100 can serve" in told
    slower = told.partition("use --speedup ")[2].split(",")[0]
    assert "overload" not in simulate(trace, "--speedup", slower).out


def test_policies_are_judged_by_their_own_targets_unless_one_states_none(
    trace: Path, tmp_path: Path, simulate: Simulate
) -> None:
    (policy,) = written((tmp_path / "policy.yaml", "classes: {only: {ttft: 1ms}}"))
    flags: tuple[list[str], ...] = ([], ["--compare", "fcfs"], ["--good-first-token", "5"])
    goodput = [simulate(trace, "--policy", policy, *more).runs[0]["goodput"] for more in flags]
    assert goodput[0] == 0 < min(goodput[1:])


def table(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]))
    return path


def test_a_table_of_any_program_is_simulated_and_what_is_not_read_is_said(tmp_path: Path, simulate: Simulate) -> None:
    rows = [f"{100 * n},{20 + n},{4 + n % 9},{'ab'[n % 2]},eu" for n in range(60)]
    path = table(tmp_path / "t.csv", "at,Request,Response,user,region", *rows)
    done = simulate(path, "--columns", "milliseconds=at,prompt=Request,output=Response,tenant=user")
    assert [tenant["name"] for tenant in done.runs[0]["tenants"]] == ["a", "b"]
    assert "not read: region; --columns says what a column is" in done.out


def test_a_column_without_effect_is_named(tmp_path: Path, simulate: Simulate) -> None:
    header = "arrived_at,num_prefill_tokens,num_decode_tokens,tenant,session,service_tier"
    out = simulate(table(tmp_path / "t.csv", header, "0,20,4,a,1,flex", "1,20,4,b,2,flex"), "--tenants", 2).out
    for heading in ("tenant", "session", "service_tier"):
        assert f"no effect: column {heading} of the trace" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--columns", "tenant=user", "--tenants", "4"], "--columns: has no effect: --tenants 4 says another"),
        (["--columns", "session=user"], "by --tenants hash:N"),
        (["--classes", "0:1,1:1", "--service-tiers", "flex:1,none:1"], "contradicts --classes"),
        (["--service-tiers", "flex:1"], "become classes by a policy file"),
        (["--deadline", "1", "--good-first-token", "2"], "contradicts --deadline"),
        (["--columns", "promt=Request"], "did you mean prompt?"),
    ],
)
def test_flags_that_leave_each_other_without_effect_are_refused(
    tmp_path: Path, sluice: Sluice, flags: list[str], message: str
) -> None:
    path = table(tmp_path / "t.csv", "arrived_at,num_prefill_tokens,num_decode_tokens,user", "0,20,4,a")
    done = sluice("simulate", "--trace", path, *flags)
    assert done.status == 2 and message in done.err


def test_a_good_request_keeps_its_own_deadline(tmp_path: Path, simulate: Simulate) -> None:
    header = "arrived_at,num_prefill_tokens,num_decode_tokens,deadline,done_within"
    path = table(tmp_path / "t.csv", header, "0,400,9,,", "10,400,9,0.001,", "20,400,9,,0.02", "30,400,9,5,9")
    trusting = "order=fcfs,overload=bounded"
    assert simulate(path, "--policy", trusting).runs[0]["goodput"] == 0.5
    assert simulate(path, "--policy", trusting, "--deadline", 0.002).runs[0]["goodput"] == 0.25


def test_a_deadline_for_all_is_what_the_core_admits_by(trace: Path, simulate: Simulate) -> None:
    hurried = simulate(trace, "--speedup", 100, "--deadline", 0.1).runs[0]
    assert hurried["refusals"].keys() <= {"DeadlineUnmeetable"} and hurried["refusals"]


def test_the_busy_time_is_divided_between_prompts_and_answers(tmp_path: Path, simulate: Simulate) -> None:
    header = "arrived_at,num_prefill_tokens,num_decode_tokens"
    prompts = simulate(table(tmp_path / "p.csv", header, *[f"{n},2000,1" for n in range(5)])).runs[0]
    answers = simulate(table(tmp_path / "a.csv", header, *[f"{n},1,200" for n in range(5)])).runs[0]
    assert prompts["prefill_share"] > 0.9 and answers["prefill_share"] < 0.05
    assert prompts["good_output_rate"] == prompts["output_rate"] > 0


def test_a_sweep_simulates_each_load_and_names_the_knee(trace: Path, tmp_path: Path, simulate: Simulate) -> None:
    done = simulate(trace, "--sweep", "0.5:20:3", "--compare", "fcfs", "--html", tmp_path / "sweep.html")
    assert [entry["load"] for entry in done.report["loads"]] == [0.5, 10.25, 20.0]
    assert done.report["knees"].keys() == {"fair", "fcfs"} and done.report["knees"]["fair"] >= 0.5
    assert "0.5 to 20 times capacity" in done.out and "largest load with 90.0 % good" in done.out
    assert "By load" in (tmp_path / "sweep.html").read_text()


def test_a_sweep_and_another_pace_contradict_each_other(trace: Path, sluice: Sluice) -> None:
    assert (
        "not allowed with argument --sweep" in sluice("simulate", "--trace", trace, "--sweep", "1:2", "--load", 1).err
    )
