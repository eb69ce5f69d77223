"""What README shows runs as it stands."""

import re
from pathlib import Path

import pytest

from quotas.policy.policy_file import parse_policy
from tests.gateway.server_process import ServerProcess

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ONLINE, TOOLS, OFFLINE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COUNTED = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"


def test_the_client_examples_stream_the_answer_and_call_the_tool(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ONLINE.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
    names: dict[str, object] = {}
    exec(program.replace("sk-sluice-demo-…", server.key), names)
    assert capsys.readouterr().out == COUNTED
    exec(TOOLS, names)
    assert capsys.readouterr().out == 'get_weather {"city": "Oslo"}\n'


def test_the_offline_example_prints_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    exec(OFFLINE, {})
    assert capsys.readouterr().out.splitlines()[0] == COUNTED


def test_the_policy_example_is_one() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    acme = parse_policy({"policy.yaml": example.encode()}).tenant("acme")
    assert acme.weight == 2 and len(acme.limits) == 5


def test_every_command_that_is_shown_exists() -> None:
    root = Path(__file__).parents[1]
    scripts = set(re.findall(r"^(scripts/\w+)", README, re.MULTILINE))
    assert scripts
    assert all((root / script).is_file() for script in scripts)
