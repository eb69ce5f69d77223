"""The compiled core decides what the interpreted one does, to the byte.

It is what the installation has compiled; where the sources are others by now, the night compiles it, not optimized.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from admission.core import CoreConfig
from admission.event_logs.event_log import replay
from backend import compile_core, compiled_core
from backend.bound_process import bound
from gateway.telemetry.event_log_file import read_event_log
from tests.examples import examples
from tests.gateway.server_process import PATIENCE, eventually, running_server
from tests.labs.core.log_runs import random_run

pytestmark = pytest.mark.timeout(1800)  # compiling takes minutes, and on a busy machine many
ROOT = Path(__file__).parents[3]
COMPILED = """\
import sys
from pathlib import Path
from backend import compiled_core
compiled_core.home = lambda: Path(sys.argv[1])
assert compiled_core.use()
"""
REPLAYS = """\
from admission.event_logs.event_log import replay
from tests.labs.core.test_recorded_logs import LOGS, lines
for path in LOGS.values():
    recorded = list(lines(path))
    assert len(list(replay(recorded))) == len(recorded), path
"""
RUNS = """\
from admission.core import CoreConfig
from tests.labs.core.log_runs import random_run
for seed in map(int, sys.argv[2:]):
    for shared in (False, True):
        print(*random_run(CoreConfig(), seed, losses=0.02, failures=0.02, is_shared=shared), sep="\\n")
"""
DERIVED = """\
from importlib import import_module
from pkgutil import walk_packages
import gateway, quotas, admission, backend
for package in (gateway, quotas, admission, backend):
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        if "triton" not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)
def derived(kind):
    return [one for each in kind.__subclasses__() for one in (each, *derived(each))]
kinds = {kind for name in compiled_core.MODULES for kind in vars(sys.modules[name]).values() if isinstance(kind, type)}
own = {kind for kind in kinds if kind.__module__ in compiled_core.MODULES}
assert len(own) > 60, own
outside = [one for kind in own for one in derived(kind) if one.__module__ not in compiled_core.MODULES]
print([one for one in outside if not getattr(one, "_is_protocol", False)])
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the core was compiled to."""
    if compiled_core.compiled() is not None:
        return compiled_core.home()
    if not request.config.getoption("--all"):
        pytest.skip("the core is not compiled from these sources, which takes minutes: the night does it")
    directory = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        for module in (compile_core, compiled_core):
            patch.setattr(module, "home", lambda: directory)
        assert compile_core.compile_core(optimization=0), "see the warning"
        assert compile_core.main([]) == 0, "and not once more"
    return directory


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    """Runs a program with the compiled core in a process of its own, and returns what it prints."""

    def run(program: str, *arguments: object) -> str:
        command = [sys.executable, "-W", "error", "-c", COMPILED + program, home, *map(str, arguments)]
        done = subprocess.run(**bound(command), check=False, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_recorded_log_is_decided_again_to_the_byte(run: Run) -> None:
    run(REPLAYS)


def test_random_runs_are_decided_alike(run: Run) -> None:
    seeds = range(examples(3))
    interpreted = [
        line
        for seed in seeds
        for shared in (False, True)
        for line in random_run(CoreConfig(), seed, losses=0.02, failures=0.02, is_shared=shared)
    ]
    assert run(RUNS, *seeds).splitlines() == interpreted


def test_no_interpreted_class_derives_from_a_compiled_one(run: Run) -> None:
    assert run(DERIVED) == "[]\n", "nobody can make one then"


def test_a_gateway_serves_with_it_and_says_so(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_HOME", str(home))
    log = tmp_path / "log"
    body = {"model": "embedded", "prompt": "3, 4, 5, 6, 7, 8, 9, " * 5, "temperature": 0, "max_tokens": 20}
    with running_server(tmp_path, f"--event-log={log}", program="tests.gateway.compiled_server", warm=False) as server:
        answers = [server.post("/v1/completions", **body).json() for _ in range(3)]
        with server.stream("/v1/completions", **body) as streamed:
            assert streamed.read().endswith(b"data: [DONE]\n\n")
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        eventually(server.is_idle)
    assert "by the compiled core" in server.log.read_text()
    recorded = list(read_event_log(log))
    assert len(list(replay(recorded))) == len(recorded) > 50, "by the interpreted core"
