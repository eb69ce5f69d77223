"""Environments made of a few files, each looked at by an interpreter of its own: this one has imported our packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sluice
from sluice.conflicts import PACKAGES, PackageConflict, check_packages

CHECK = "import sys; sys.path[:0] = sys.argv[1:]; import sluice.__main__; sys.exit(sluice.__main__.main())"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with Sluice, whose command prints that it runs."""
    path = tmp_path / "site-packages"
    shutil.copytree(Path(sluice.__file__).parent, path / "sluice", ignore=shutil.ignore_patterns("__pycache__"))
    for package in PACKAGES[1:]:
        write(path / package / "__init__.py")
    write(path / "backend" / "compiled_core.py", "def use():\n    return False\n")
    write(path / "gateway" / "cli" / "__init__.py")
    write(path / "gateway" / "cli" / "main.py", "def main(arguments=None):\n    print('it runs')\n    return 0\n")
    record(path, "sluice_gateway-0.1.0", "sluice/__init__.py", "gateway/__init__.py", "backend/__init__.py")
    return path


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def record(site: Path, distribution: str, *files: str) -> None:
    """Write what an installer writes of a distribution such as `parrot-2.0`."""
    name, version = distribution.split("-")
    home = site / f"{distribution}.dist-info"
    write(home / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    write(home / "RECORD", "".join(f"{file},,\n" for file in files))


def run(*path: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-I", "-S", "-c", CHECK, *map(str, path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_runs_where_all_packages_are_ours(site: Path) -> None:
    record(site, "parrot-2.0", "parrot/backend/__init__.py", "my_backend/__init__.py", "backend.py")
    assert run(site) == (0, "it runs\n", "")


def test_a_distribution_that_shares_a_package_is_named(site: Path) -> None:
    record(site, "parrot-2.0", "parrot/__init__.py", "backend/birds.py")
    status, out, error = run(site)
    assert (status, out) == (1, "")
    assert error.startswith("sluice: the distribution parrot 2.0 has a package `backend`, as Sluice has")
    assert "environment of its own" in error and error.count("\n") == 1


def test_the_other_sluice_is_named(site: Path) -> None:
    record(site, "sluice-0.3.1", "sluice/birds.py", "sluice-0.3.1.dist-info/METADATA")
    status, _, error = run(site)
    assert status == 1 and error.startswith("sluice: the distribution sluice 0.3.1 has a package `sluice`")


def test_a_distribution_that_comes_first_on_the_path_is_named(site: Path, tmp_path: Path) -> None:
    write(tmp_path / "first" / "gateway" / "__init__.py", "raise RuntimeError('it was imported')")
    record(tmp_path / "first", "parrot-2.0", "gateway/__init__.py")
    status, _, error = run(tmp_path / "first", site)
    assert status == 1
    assert f"finds {tmp_path / 'first' / 'gateway'}, of the distribution parrot 2.0, instead of Sluice's" in error


def test_a_directory_that_comes_first_on_the_path_is_named(site: Path, tmp_path: Path) -> None:
    write(tmp_path / "first" / "quotas" / "__init__.py")
    status, _, error = run(tmp_path / "first", site)
    assert status == 1 and str(tmp_path / "first" / "quotas") in error


def test_a_package_that_went_with_another_distribution_is_missed(site: Path) -> None:
    (site / "admission" / "__init__.py").unlink()
    status, _, error = run(site)
    assert status == 1 and "`admission` is missing" in error and "Reinstall" in error


def test_a_later_package_on_the_path_takes_nothing_from_ours(site: Path, tmp_path: Path) -> None:
    write(tmp_path / "later" / "backend" / "__init__.py")
    record(tmp_path / "later", "parrot-2.0", "backend/__init__.py")
    assert run(site, tmp_path / "later") == (0, "it runs\n", "")


def test_a_conflict_is_an_import_error() -> None:
    check_packages()
    assert issubclass(PackageConflict, ImportError)
