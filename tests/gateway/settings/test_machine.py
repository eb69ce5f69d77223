import os
from pathlib import Path

import pytest

from gateway.settings.machine import spare_cores, usable_cores


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
    ],
)
def test_a_container_quota_lowers_the_cores(tmp_path: Path, cpu_max: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_without_a_quota_every_scheduled_core_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "missing") == 8


def test_one_core_is_spared_unless_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.settings.machine.usable_cores", lambda: 4)
    assert spare_cores() == 3
    monkeypatch.setattr("gateway.settings.machine.usable_cores", lambda: 1)
    assert spare_cores() == 1
