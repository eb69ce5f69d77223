"""The wheel, in an environment of its own: it must bring its own files and name all that it needs.

Only torch and the libraries it brings are lent from this environment, because they are gigabytes.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import httpx
import pytest

from backend.bound_process import bound
from sluice.conflicts import DISTRIBUTION

ROOT = Path(__file__).parent.parent
LENT = re.compile("(torch|triton|nvidia-.*|cuda-.*)$", re.IGNORECASE)
ROOMS = ("sluice", "fleet", "gateway", "admission", "quotas", "backend")
BROUGHT = {"pydantic_core": "pydantic"}  # what comes with a requirement, of its very version
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory for an environment that pytest's own would keep."""
    with tempfile.TemporaryDirectory(prefix="sluice-wheel-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", place, ROOT)
    (path,) = place.glob(f"{DISTRIBUTION}-*.whl")
    return path


def lend(environment: Path) -> None:
    """Link torch and its libraries into `environment`; pip finds them installed."""
    (target,) = environment.glob("lib/python*/site-packages")
    for distribution in distributions():
        if LENT.match(distribution.name):
            home = Path(str(distribution.locate_file("")))
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                if not (target / top).exists():
                    (target / top).symlink_to(home / top)


@pytest.fixture(scope="module")
def stranger(place: Path) -> Path:
    """The wheel of a made-up distribution that has a package `backend` too."""
    path = place / "parrot-2.0-py3-none-any.whl"
    home = "parrot-2.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("backend/__init__.py", "raise RuntimeError('the stranger was imported')")
        archive.writestr(f"{home}/METADATA", "Metadata-Version: 2.1\nName: parrot\nVersion: 2.0\n")
        archive.writestr(f"{home}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{home}/RECORD", "")
    return path


def pip(python: str | Path, *arguments: str | Path) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def serving(command: Path, place: Path) -> Iterator[str]:
    """What a gateway announced, while it runs; away from the checkout, from this environment's settings and from
    compilers.
    """
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "PYTHON"))}
    folders = {"XDG_STATE_HOME": str(place / "state"), "SLUICE_CACHE_DIR": str(place / "cache")}
    environ = keep | folders | {"PATH": str(command.parent)}
    with (place / "log").open("w+") as log:
        arguments = [str(command), "serve", "--port", "0", "--admin-port", "0"]
        process = subprocess.Popen(
            **bound(arguments), cwd=place, env=environ, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        try:
            announced = ""
            while "curl" not in announced:
                line = process.stdout.readline()
                assert line, f"the gateway ended: {(place / 'log').read_text()}"
                announced += line
            yield announced
        finally:
            process.terminate()
            process.communicate(timeout=240)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match, text
    return match[1]


def interpreter(version: str) -> str:
    """A Python of this version: this one, or one on the path or of pyenv."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for python in (f"python{version}", *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))):
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-c", "import venv, ensurepip"], check=True, capture_output=True)
            return python
    pytest.skip(f"there is no Python {version}")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_binary_wheel_serves_a_streamed_answer_in_an_empty_environment_without_a_compiler(
    version: str, place: Path
) -> None:
    """Under another Python torch cannot be lent: pip fetches it, 3 GB with CUDA."""
    python, home = interpreter(version), place / version
    environ = os.environ | {"WHEELS": str(home)}
    subprocess.run([ROOT / "scripts" / "wheel", python], env=environ, check=True, capture_output=True)
    tag = f"cp{version.replace('.', '')}"
    (wheel,) = home.glob(f"{DISTRIBUTION}-*-{tag}-{tag}-linux_*.whl")
    environment = home / "environment"
    subprocess.run([python, "-m", "venv", environment], check=True)
    if python == sys.executable:
        lend(environment)
    own = environment / "bin" / "python"
    pip(own, "install", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    check_answer(environment / "bin" / "sluice", home)
    log = (home / "log").read_text()
    assert "by the compiled core" in log
    assert "kernels" not in log and not (home / "cache").exists(), "those of the wheel serve"


def check_answer(command: Path, home: Path) -> None:
    with serving(command, home) as announced:
        url = found(r"curl -N (\S+)", announced)
        headers = {"Authorization": "Bearer " + found(r"Bearer (\S+?)'", announced)}
        body = json.loads(found(r"-d '(.*)'", announced))
        with httpx.stream("POST", url, headers=headers, json=body, timeout=240) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        page = httpx.get(found(r"admin +(\S+),", announced))
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert response.status_code == 200
    assert events[-1] == "[DONE]"
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert all(str(number) in text for number in range(3, 13)), text


def requirements(wheel: Path) -> list[str]:
    """What the wheel says that it needs, with and without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)


def test_the_wheel_requires_torch(wheel: Path) -> None:
    assert any(requirement.startswith("torch>=") for requirement in requirements(wheel))


def test_the_wheel_requires_neither_triton_nor_a_compiler(wheel: Path) -> None:
    """Triton is 1 GB, and a torch for CUDA brings it; mypy compiles the core, which is offered."""
    everybodys = [requirement for requirement in requirements(wheel) if "extra ==" not in requirement]
    assert not [requirement for requirement in everybodys if re.match("triton|mypy|setuptools|pip", requirement)]


def test_the_wheel_names_every_imported_distribution(wheel: Path) -> None:
    homes = packages_distributions()
    named = {re.split("[^a-z0-9-]", requirement.lower())[0] for requirement in requirements(wheel)}
    for package in imported() - set(sys.stdlib_module_names) - set(ROOMS):
        name = BROUGHT.get(package, package)
        found = homes.get(name, [name])  # what an extra brings need not be installed, and then goes by its own name
        assert {home.lower().replace("_", "-") for home in found} & named, package


def imported() -> set[str]:
    """The packages that any module of ours imports, ours among them."""
    found = set()
    for room in ROOMS:
        for source in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found


def test_the_wheel_holds_every_file_of_ours_the_licence_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert ours and ours <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "labs/benchmarks/", "scripts/")) for name in names)


@pytest.mark.parametrize(
    "is_last",
    [pytest.param(True, id="installed after"), pytest.param(False, id="installed before", marks=pytest.mark.nightly)],
)
def test_a_stranger_with_a_package_of_our_name_is_named_at_the_start(
    is_last: bool, wheel: Path, stranger: Path, tmp_path: Path
) -> None:
    """Whichever pip installs last, it says nothing of the other; nothing that we depend on is needed to say it."""
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin" / "python"
    for path in (wheel, stranger) if is_last else (stranger, wheel):
        pip(sys.executable, "--python", python, "install", "--no-deps", "--no-index", "--no-compile", path)
    command = subprocess.run([tmp_path / "bin" / "sluice", "version"], check=False, capture_output=True, text=True)
    assert (command.returncode, command.stdout) == (1, "")
    assert command.stderr.startswith("sluice: the distribution parrot 2.0 has a package `backend`, as Sluice has")
    program = [python, "-I", "-c", "from sluice import LLM"]
    imported = subprocess.run(program, check=False, capture_output=True, text=True)
    assert "PackageConflict: the distribution parrot 2.0 has a package `backend`" in imported.stderr
