"""Processes of this program's own modules run the sources of their parent, not an installed version."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from backend import own_process

PARENT = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from backend.own_process import module_command, module_environment
subprocess.run(module_command("backend.child"), env=module_environment(), check=True)
"""


def test_a_tree_that_is_not_installed_finds_itself_and_nothing_of_the_working_directory(tmp_path: Path) -> None:
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    for folder in (tree, elsewhere):
        (folder / "backend").mkdir(parents=True)
        (folder / "backend" / "__init__.py").touch()
        (folder / "backend" / "child.py").write_text("print(__file__)")
    shutil.copy(own_process.__file__, tree / "backend")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PARENT, tree], cwd=elsewhere, env=environ, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tree / "backend" / "child.py"


def test_an_installation_needs_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process, "ROOT", sysconfig.get_path("purelib"))
    assert own_process.module_environment() == dict(os.environ)


def test_paths_that_were_given_come_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/given")
    monkeypatch.setattr(own_process, "ROOT", "/tree")
    assert own_process.module_environment()["PYTHONPATH"] == f"/tree{os.pathsep}/given"
