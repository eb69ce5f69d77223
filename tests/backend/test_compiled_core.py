import ast
import logging
import sys
from pathlib import Path

import pytest

from backend import compiled_core
from backend.compiled_core import MODULES, directory_name, sources

PACKAGES = ("admission", "backend", "fleet", "gateway", "quotas")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of what was compiled, for a process that has imported nothing of the core."""
    monkeypatch.setattr(compiled_core, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_another_source_or_another_python_has_another_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = sources()
    name = directory_name(contents)
    assert directory_name(sources()) == name
    for path, content in contents.items():
        assert directory_name({**contents, path: content + b"\n"}) != name
        assert directory_name({other: said for other, said in contents.items() if other != path}) != name
    monkeypatch.setattr(compiled_core, "EXTENSION_SUFFIXES", [".cpython-399.so"])
    assert directory_name(contents) != name


def test_our_modules_that_compiled_ones_import_count_among_their_sources() -> None:
    known = sources()
    for name in MODULES:
        tree = ast.parse(known[f"{name.replace('.', '/')}.py"])
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        ours = [f"{module.replace('.', '/')}.py" for module in imported if module.split(".")[0] in PACKAGES]
        assert [path for path in ours if path not in known] == []


def test_the_core_is_interpreted_where_it_was_not_compiled(untouched: Path) -> None:
    assert not compiled_core.use()
    assert not compiled_core.is_used()
    assert compiled_core.compiled() is None


def test_a_core_of_which_something_was_imported_stays_as_it_is(
    untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (untouched / directory_name(sources())).mkdir()
    monkeypatch.setitem(sys.modules, MODULES[0], sys)
    assert not compiled_core.use()
    assert not compiled_core.is_used()


def test_an_unloadable_compiled_core_is_not_used_and_the_log_says_so(
    untouched: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = untouched / directory_name(sources())
    directory.mkdir()
    (directory / f"{compiled_core.LIBRARY}.so").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        assert not compiled_core.use()
    assert "interpreted instead" in caplog.text
    assert not compiled_core.is_used()
