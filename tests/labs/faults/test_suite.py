import json
import signal
from pathlib import Path

import pytest

from labs.faults import suite
from labs.faults.altered import ALTERATIONS
from labs.faults.release import released
from labs.faults.site import Process
from labs.simulation.errors import SimulationError
from scripts import record_logs
from tests.gateway.server_process import eventually
from tests.quotas.stores import is_running

DOCS = Path(__file__).parents[3] / "docs" / "bench.md"
NAMES = sorted(path.stem for path in suite.SCENARIOS.glob("*.yaml"))

SMALL = """
about: A store that hangs for a second loses nothing.
policy: {tenants: {acme: {limits: {tokens: 1B/month, concurrent_requests: 10}}}}
audit: true
traffic:
  seconds: 4
  phases: {before: [0, 1], after: [2, 4]}
  tenants: {acme: {clients: 2, output_tokens: 4, body: {ignore_eos: true}}}
faults: {1s: pause store, 2s: resume store, 3s: cut clients}
expect:
  - after.acme.answered >= 1
  - acme.failed <= 4
  - release.steps <= 2
spare: [complaints == 0]
guard: {what: notice of hangups, altered: without_hangups}
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_read_and_its_switch_exists(name: str) -> None:
    play = suite.read(suite.SCENARIOS / f"{name}.yaml")
    switch = play.guard
    assert switch is None or switch.altered or switch.flags or switch.policy
    assert {play.altered, switch.altered if switch else ""} - {""} <= set(ALTERATIONS)
    assert set(play.spare) <= set(suite.ALWAYS)


def test_the_page_lists_all_scenarios() -> None:
    listed = {line.split("`")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")}
    assert set(NAMES) <= listed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pause store", "break store", "there is no break; there are kill, stop"),
        ("pause store", "pause", "pause has 1 more words"),
        ("pause store", "pause stroe", "'pause stroe': there is no process stroe; there are store, router"),
        ("pause store", "starve store much", "'starve store much': much is not a size"),
        ("cut clients", "delay clients 60", "'delay clients 60': 60 is not a duration"),
        ("cut clients", "jump clock -1x", "'jump clock -1x': -1x is not a duration"),
        ("cut clients", "cut wires", "there is no connection wires; there are clients, replicas, store"),
        ("acme.failed <= 4", "acme.failed", "is no comparison"),
        ("about:", "abuot:", "about: Field required"),
    ],
)
def test_a_wrong_word_is_named_with_its_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(SimulationError, match=message) as raised:
        suite.read(path)
    assert "small.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theirs"], "mine has no scenario theirs; there are mine, plain"),
        (["--replicas", "3"], "invalid choice: 3"),
        (["--without-guard", "plain"], "no chosen scenario has a guard"),
    ],
)
def test_a_choice_of_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.yaml").write_text(SMALL)
    (folder / "plain.yaml").write_text(SMALL.partition("guard:")[0])
    with pytest.raises(SystemExit, match="2"):
        suite.main(["--scenarios", str(folder), "--results", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_the_scenarios_of_another_folder_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "other"):
        (tmp_path / f"{name}.yaml").write_text(SMALL)
    played = []
    monkeypatch.setattr(suite, "_row", lambda report, name, play, *_: played.append(name) or {"scenario": name})
    assert suite.main(["--scenarios", str(tmp_path), "--results", str(tmp_path), "mine"]) == 0
    assert played == ["mine", "mine"]


def test_every_sequence_of_a_log_is_released_within_two_steps() -> None:
    lines = record_logs.read(record_logs.FOLDER / "cancels.log.gz")
    steps = [one.steps for one in released(lines)]
    assert len(steps) > 10 and max(steps) <= 2


def test_a_log_is_replayed_from_its_first_segment_and_an_empty_one_measures_nothing(tmp_path: Path) -> None:
    lines = record_logs.read(record_logs.FOLDER / "cancels.log.gz")
    log, half = tmp_path / "gateway0.events", len(lines) // 2
    log.write_text("")
    assert suite.releases([log]) == {"release.steps": None, "release.sequences": 0.0, "computed": 0.0}
    log.with_name(f"{log.name}.1").write_text("".join(f"{line}\n" for line in lines[:half]))
    log.write_text("".join(f"{line}\n" for line in lines[half:]))
    found = released(lines)
    steps, last = max(one.steps for one in found), max(one.arrived for one in found)
    (tokens,) = (one.tokens for one in found if one.arrived == last)
    figures = {"release.steps": steps, "release.sequences": len(found)}
    assert suite.releases([log]) == figures | {"computed": sum(one.tokens for one in found)}
    assert suite.releases([log], last) == figures | {"computed": tokens}


def test_a_restart_ends_what_the_killed_program_left(tmp_path: Path) -> None:
    program = ["bash", "-c", "sleep 600 & echo $!; exec sleep 600"]
    process, log = Process("program", program, tmp_path / "log", {}), tmp_path / "log"
    process.start()
    eventually(lambda: log.read_text().endswith("\n"))
    (left,) = log.read_text().split()
    process.signal(signal.SIGKILL)
    eventually(lambda: not process.is_running)
    process.start()
    eventually(lambda: not is_running(int(left)))
    process.stop()


@pytest.mark.nightly  # it starts programs as a user does, with a cold interpreter each
@pytest.mark.timeout(900)
def test_a_scenario_is_played_on_real_programs(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert suite.main(["--scenarios", str(tmp_path), "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "faults.json").read_text())["tables"]["scenarios"]
    told = [(row["scenario"], row["on"], row["missed"]) for row in rows]
    assert told == [("small", "one gateway", ""), ("small", "a router with 2", "")]
