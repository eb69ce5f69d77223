"""An environment is made once, whole, and again where that was cut short."""

from pathlib import Path
from typing import Any

import pytest

from labs.benchmarks import own_environment as module
from labs.benchmarks.own_environment import own_environment


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The arguments of pip in environments that are empty folders."""
    calls: list[list[str]] = []

    def make(directory: Path, **_: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module.venv, "create", make)
    monkeypatch.setattr(module, "bound", lambda command: {"args": command})
    monkeypatch.setattr(module.subprocess, "run", lambda args, check: calls.append(args[4:]))
    return calls


def test_it_is_named_after_what_is_installed_and_made_once(pip: list[list[str]], tmp_path: Path) -> None:
    programs = own_environment("tool[proxy]==1.2")
    assert own_environment("tool[proxy]==1.2") == programs == tmp_path / "benchmarks" / "tool-1.2" / "bin"
    assert pip == [["install", "--only-binary=:all:", "tool[proxy]==1.2"]]


def test_an_unused_package_is_uninstalled(pip: list[list[str]]) -> None:
    own_environment("tool==1.2", ("audio", "vision"))
    assert pip[1:] == [["uninstall", "--yes", "audio", "vision"]]


def test_an_installation_that_was_cut_short_is_begun_anew(pip: list[list[str]]) -> None:
    programs = own_environment("tool==1.2")
    (programs.parent / module.INSTALLED).unlink()
    own_environment("tool==1.2")
    assert len(pip) == 2


def test_only_packages_to_compile_come_as_sources(pip: list[list[str]]) -> None:
    own_environment("tool==1.2", also=("extra==3",), compiled=("tool",))
    assert pip == [["install", "--only-binary=:all:", "--no-binary=tool", "tool==1.2", "extra==3"]]
