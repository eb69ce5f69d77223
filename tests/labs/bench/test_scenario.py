from pathlib import Path
from typing import Any

import pytest

from labs.bench.scenario import Scenario, ScenarioError
from labs.simulation.errors import OptionError

GOOD = """
seconds: 1min
targets: {ttft: 500ms}
tenants:
  acme: {key_env: ACME_KEY, weight: 2, rate: 3, deadline: 5s, headers: {x-a: b}}
  labs: {key: sk, clients: 8, workload: summary, targets: {total: 20s}}
  old: {key: sk, trace: old.csv, speed: 2}
"""


def test_a_file_says_tenants_targets_and_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(GOOD)
    monkeypatch.setenv("ACME_KEY", "sk-acme")
    scenario = Scenario.read(path, {"seconds": "2min"})
    acme, labs, old = scenario.tenants.values()
    assert (scenario.seconds, acme.rate, labs.clients) == (120.0, 3.0, 8)
    assert acme.request_headers() == {"authorization": "Bearer sk-acme", "x-sluice-deadline-ms": "5000", "x-a": "b"}
    assert (scenario.targets_of("acme").ttft, scenario.targets_of("labs").total) == (0.5, 20.0)
    assert old.trace == tmp_path / "old.csv"
    twice = scenario.at_load(2)
    assert [twice.tenants["acme"].rate, twice.tenants["labs"].clients, twice.tenants["old"].speed] == [6.0, 16, 4.0]
    assert "sk" not in str(scenario.without_keys()["tenants"]["labs"])


def test_a_key_whose_variable_is_not_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(GOOD)
    monkeypatch.delenv("ACME_KEY", raising=False)
    with pytest.raises(OptionError, match=r"key_env.*ACME_KEY"):
        _ = Scenario.read(path, {}).tenants["acme"].secret


@pytest.mark.parametrize(
    ("tenant", "message"),
    [
        ({}, "tenants.a: exactly one of rate, trace and clients sets the pace, not none"),
        ({"rate": 1, "clients": 2}, "not rate and clients"),
        ({"rate": 0}, "tenants.a.rate: Input should be greater than 0"),
        ({"rate": 1, "leave": 1.5}, "tenants.a.leave: Input should be less than or equal to 1"),
        ({"rate": 1, "workload": "chats"}, "tenants.a.workload: there is no workload chats: chat, rag"),
        ({"rate": 1, "deadline": "5"}, "tenants.a.deadline: "),
        ({"rate": 1, "wieght": 1}, "tenants.a.wieght: Extra inputs"),
        ({"trace": "t.csv", "output_tokens": 5}, "a trace has its own lengths"),
        ({"rate": 1, "start": "5s", "stop": 5}, "tenants.a: stop (5 s) must be after start (5 s)"),
    ],
)
def test_a_wrong_field_is_named(tenant: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        Scenario.parse({"tenants": {"a": tenant}}, "file")
    assert str(raised.value).startswith("file: ") and message in str(raised.value)


@pytest.mark.parametrize("text", ["", "[1]", "a: b: c", "\xff"])
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError, match="--scenario"):
        Scenario.read(path, {})


def test_a_warm_up_leaves_something_to_count() -> None:
    with pytest.raises(ScenarioError, match="leaves nothing of 5 s"):
        Scenario.parse({"seconds": 5, "warm_up": 5, "tenants": {"a": {"rate": 1}}}, "file")


@pytest.mark.parametrize("phase", [[3, 3], [0, 6]])
def test_a_phase_lies_within_the_seconds(phase: list[int]) -> None:
    with pytest.raises(ScenarioError, match="the phase odd must begin before it ends, within 5 s"):
        Scenario.parse({"seconds": 5, "phases": {"odd": phase}, "tenants": {"a": {"rate": 1}}}, "file")
