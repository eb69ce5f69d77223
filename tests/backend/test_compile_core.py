import logging
from pathlib import Path

import pytest

from backend import compile_core, compiled_core


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (compile_core, compiled_core):
        monkeypatch.setattr(module, "home", lambda: tmp_path)
    return tmp_path


def test_without_mypy_the_core_stays_interpreted_and_the_remedy_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_core, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert compile_core.main([]) == 1
    assert caplog.text.endswith("core: scripts/compile\n")
    assert list(home.iterdir()) == []
    monkeypatch.setattr(compiled_core, "ROOT", home)
    assert "pip install mypy setuptools" in compiled_core.how_to_compile(), "where a wheel is installed"


@pytest.mark.nightly
def test_a_failed_compilation_leaves_nothing_and_its_place_in_the_log(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contents = compiled_core.sources()
    contents["admission/promise.py"] += b'\n\ndef mistaken() -> int:\n    return "a word"\n'
    monkeypatch.setattr(compile_core, "sources", lambda: contents)
    with caplog.at_level(logging.WARNING):
        assert compile_core.compile_core() is None
    assert "admission/promise.py:" in caplog.text
    assert list(home.iterdir()) == []
