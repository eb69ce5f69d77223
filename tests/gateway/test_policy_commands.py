import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import main
from quotas.policy_file import read_policy
from tests.quotas.policies import EXAMPLES, POLICIES

OLD = "tenants: {acme: {weight: 2, limits: {tokens: 100k/min}}, gone: {weight: 2}, same: {weight: 5}}"
NEW = (
    "classes: {interactive: {ttft: 1s}, batch: {service_tiers: [flex]}}\n"
    "defaults: {limits: {requests: [5/s, {rate: 100/h, burst: 10}]}}\n"
    "tenants: {acme: {limits: {tokens: 200k/min}, keys: {ab12: {scopes: [limits]}}}, late: , same: {weight: 5}}"
)

BAD_RATE = '"100k/mn" is not a rate such as 100k/min or 50M/month'


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(OLD, encoding="utf-8")
    return path


@pytest.fixture
def new(tmp_path: Path) -> Path:
    path = tmp_path / "new.yaml"
    path.write_text(NEW, encoding="utf-8")
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.yaml"
    path.write_text("tenants:\n  acme:\n    limits: {tokens: 100k/mn}\n    wieght: 2\n", encoding="utf-8")
    return path


def sluice(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gateway.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_check_says_where_each_mistake_is_and_exits_with_1(broken: Path) -> None:
    done = sluice("policy", "check", broken)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f'{broken}:3:22: tenants.acme.limits.tokens: {BAD_RATE}; did you mean "100k/min"?',
        f'{broken}:4:5: tenants.acme: "wieght" is not a field; did you mean "weight"?',
        "sluice: 2 problems: no policy can be made of this",
    ]


def test_check_counts_what_it_found_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", str(POLICIES)]) == 0
    version = read_policy(POLICIES).version
    assert capsys.readouterr().out == f"valid: 1 file, 3 classes, 0 tenants, 0 keys; version {version}\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_show_prints_is_the_same_policy(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show", str(path)]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_policy(shown) == read_policy(path)
    assert main(["policy", "diff", str(path), str(shown)]) == 0


def test_show_of_one_tenant_leaves_the_others_out(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, weight in (("acme", 2), ("stranger", 1)):
        assert main(["policy", "show", str(old), "--tenant", name]) == 0
        shown = tmp_path / f"{name}.yaml"
        shown.write_text(capsys.readouterr().out, encoding="utf-8")
        tenants = read_policy(shown).tenants
        assert (list(tenants), tenants[name].weight) == ([name], weight)


def test_diff_says_what_changes_for_whom(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "diff", str(old), str(new)]) == 1
    lines = capsys.readouterr().out.splitlines()
    acme = lines[lines.index("tenant acme") : lines.index("tenant gone (no longer named: the defaults hold)")]
    assert lines[0] == "classes: interactive, standard, batch -> interactive, batch"
    assert "class standard (removed)" in lines
    assert "  ttft: 500ms -> 1s" in lines
    assert lines[lines.index("tenants that are not named") + 1 :][:2] == [
        "  default_class: standard -> interactive",
        "  limits.requests: unlimited -> 5/s, 100/h (burst 10)",
    ]
    assert acme[1:] == [
        "  weight: 2 -> 1",
        "  default_class: standard -> interactive",
        "  limits.requests: unlimited -> 5/s, 100/h (burst 10)",
        "  limits.tokens: 100k/min -> 200k/min",
        "  keys.ab12.scopes: unset -> limits",
        "  keys.ab12.models: unset -> *",
        *[f"  keys.ab12.limits.{name}: unset -> unlimited" for name in ("requests", "input_tokens", "output_tokens")],
        *[f"  keys.ab12.limits.{name}: unset -> unlimited" for name in ("tokens", "concurrent_requests")],
    ]
    assert "tenant late (now named)" in lines


def test_diff_of_a_policy_with_itself_is_nothing(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "diff", str(old), str(old)]) == 0
    assert capsys.readouterr().out == "nothing changes\n"


def test_diff_with_a_broken_policy_exits_with_2(old: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "diff", str(old), str(broken)]) == 2
    assert main(["policy", "show", str(broken)]) == 1
    assert capsys.readouterr().out == ""


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$defs"]["tenant"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["policy"], "required: COMMAND"),
        (["policy", "chekc"], "invalid choice: 'chekc'"),
        (["policy", "check"], "required: PATH"),
        (["policy", "show", "x", "--tenant", "a b"], "'a b' is no name of a tenant"),
    ],
)
def test_a_command_asked_for_wrongly_exits_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_path_that_is_not_there_is_named() -> None:
    done = sluice("policy", "check", "nowhere.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("nowhere.yaml: cannot be read: No such file or directory\n")
