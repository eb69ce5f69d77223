from pathlib import Path

import pytest

from backend import compiled_core
from gateway.doctor import machine_checks
from gateway.doctor.check import Verdict

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


def test_the_clock() -> None:
    assert machine_checks.clock(1_900_000_000.0, synchronised=True).verdict is OK
    loose = machine_checks.clock(1_900_000_000.0, synchronised=False)
    assert (loose.verdict, "NTP" in loose.remedy) == (WARNING, True)
    assert machine_checks.clock(0.0, synchronised=True).verdict is PROBLEM
    assert "UTC" in machine_checks.clock().found


def test_compiled_and_uncompiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    missing = machine_checks.kernels("fpu avx2 fma")
    assert missing.verdict is WARNING
    assert "(avx2 fma)" in missing.found
    assert "python -m backend.kernels.build" in missing.remedy or "g++" in missing.remedy
    assert not list(tmp_path.iterdir())


def test_a_compiled_and_an_interpreted_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_core, "home", lambda: tmp_path)
    interpreted = machine_checks.core()
    assert (interpreted.verdict, interpreted.remedy) == (WARNING, "python -m backend.compile_core")
    (tmp_path / compiled_core.directory_name(compiled_core.sources())).mkdir()
    assert machine_checks.core().verdict is OK


def test_the_gpu_that_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine_checks, "NVIDIA", tmp_path / "version")
    assert machine_checks.gpu("auto").verdict is OK
    assert "there is no NVIDIA driver" in machine_checks.gpu("cuda").found
    (tmp_path / "version").write_text("NVRM version: 999\n")
    assert machine_checks.gpu("auto").verdict is WARNING
    assert "the driver is there" in machine_checks.gpu("cuda").found
    assert machine_checks.gpu("cpu").verdict is OK
