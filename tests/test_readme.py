"""What README and examples/ show runs as it stands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quotas.policy.policy_file import parse_policy
from tests.gateway.server_process import ServerProcess

EXAMPLES = Path(__file__).parents[1] / "examples"
README = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
ONLINE, OFFLINE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COUNTED = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"


def test_the_client_example_streams_the_answer(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    program = ONLINE.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
    exec(program.replace("sk-sluice-demo-…", server.key), {})
    assert capsys.readouterr().out == COUNTED


def run_example(program: str, server: ServerProcess, *arguments: str) -> list[str]:
    """The lines that it prints."""
    environ = os.environ | {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
    command = [sys.executable, EXAMPLES / program, *arguments]
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_of_openais_client_streams_and_has_an_answer_of_a_class(server: ServerProcess) -> None:
    assert run_example("openai_client.py", server) == [COUNTED, "City", "unlimited requests left"]


def test_the_agent_calls_its_function_and_answers_with_the_result(server: ServerProcess) -> None:
    call, answer = run_example("agent.py", server, "What is the weather in Paris?")
    assert call == 'get_weather({"city": "Paris"}) = sunny in Paris'
    assert "sunny" in answer


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_an_example_is_a_program_of_its_language_and_is_listed(path: Path) -> None:
    """What others need of packages is not installed here; their clients are run by scripts/check_agents.py."""
    if path.name == "README.md":
        return
    assert path.name in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    if path.suffix == ".py":
        compile(path.read_text(encoding="utf-8"), path.name, "exec")
    else:
        checker = {".sh": ["bash", "-n"], ".mjs": ["node", "--check"]}[path.suffix]
        if shutil.which(checker[0]) is None:
            pytest.skip(f"there is no {checker[0]}")
        subprocess.run([*checker, path], check=True)


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


def test_it_is_short_and_its_picture_is_small() -> None:
    assert len(README.splitlines()) <= 140
    (picture,) = re.findall(r"!\[.+\]\((.+\.png)\)", README)
    assert 10_000 < (EXAMPLES.parent / picture).stat().st_size < 150_000
