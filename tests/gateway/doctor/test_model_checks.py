from pathlib import Path

import pytest

from backend.errors import ConfigError
from backend.model.hub import resolve_config
from backend.model.model_config import read_model_config
from gateway.doctor import model_checks
from gateway.doctor.check import Verdict
from gateway.settings.settings import Settings

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM

GIB = 2**30


@pytest.mark.parametrize(("threads", "verdict"), [(1, OK), (3, OK), (4, WARNING), (5, WARNING)])
def test_threads_against_cores(threads: int, verdict: Verdict) -> None:
    check = model_checks.threads(Settings(threads=threads), cores=4)
    assert check.verdict is verdict
    assert verdict is OK or "--threads to 3" in check.remedy


def test_a_single_core_is_shared() -> None:
    assert model_checks.threads(Settings(threads=1), cores=1).verdict is OK


def test_the_embedded_model_is_there_and_fits() -> None:
    files, memory = model_checks.model(Settings(device="cpu", kv_memory_bytes="16MiB"))
    assert (files.verdict, memory.verdict) == (OK, OK)
    assert "KV 16" in memory.found or "KV 15" in memory.found


def test_a_model_that_is_not_there() -> None:
    (check,) = model_checks.model(Settings(model="/nowhere"))
    assert check.verdict is PROBLEM
    assert "/nowhere" in check.found


def test_wishes_that_the_memory_does_not_grant() -> None:
    *_, memory = model_checks.model(Settings(device="cpu", kv_memory_bytes="1000TiB"))
    assert memory.verdict is PROBLEM
    assert "kv_memory_bytes" in memory.found


def test_weights_that_do_not_fit() -> None:
    config = read_model_config(resolve_config("embedded"))
    with pytest.raises(ConfigError, match="the weights take"):
        model_checks.plan_memory(Settings(device="cpu"), config, free=2**20)
    plan = model_checks.plan_memory(Settings(device="cpu"), config, free=4 * GIB)
    assert plan.kv + plan.weights < plan.free


@pytest.mark.parametrize(("floor", "verdicts"), [("0B", []), ("64KiB", [OK]), ("1GiB", [PROBLEM])])
def test_floors_of_the_policy_against_the_memory(tmp_path: Path, floor: str, verdicts: list[Verdict]) -> None:
    (tmp_path / "p.yaml").write_text(f"tenants: {{acme: {{prefix_cache: {{floor: {floor}}}}}}}")
    checks = model_checks.floors(
        Settings(device="cpu", kv_memory_bytes="16MiB", max_model_len=1024, policy=tmp_path / "p.yaml")
    )
    assert [check.verdict for check in checks] == verdicts
    assert not checks or verdicts == [OK] or "tenants.acme.prefix_cache.floor: floors keep" in checks[0].found


def test_floors_take_no_memory_where_nothing_is_cached(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("tenants: {acme: {prefix_cache: {floor: 1GiB}}}")
    (check,) = model_checks.floors(
        Settings(device="cpu", kv_memory_bytes="16MiB", prefix_cache="off", policy=tmp_path / "p.yaml")
    )
    assert check.verdict is OK


def test_floors_are_not_judged_where_policy_or_model_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("tenants: {acme: {prefix_cache: {floor: 1GiB}}}")
    assert not model_checks.floors(Settings(model="/nowhere", policy=tmp_path / "p.yaml"))
    (tmp_path / "p.yaml").write_text("tenant: {}")
    assert not model_checks.floors(Settings(policy=tmp_path / "p.yaml"))


def test_little_memory_left_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "free_memory", lambda: 100 * 2**20)
    *_, memory = model_checks.model(Settings(device="cpu", kv_memory_bytes="85MiB"))
    assert memory.verdict is WARNING
