import pytest

from gateway.doctor import store_checks
from gateway.doctor.check import Verdict
from gateway.settings.settings import Settings
from quotas.errors import StoreUnavailable

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


def test_the_embedded_store() -> None:
    (check,) = store_checks.store(Settings())
    assert check.verdict is OK


def test_a_store_that_is_not_there_is_named_without_its_password() -> None:
    (check,) = store_checks.store(Settings(redis_url="redis://user:hidden@127.0.0.1:1/0"))
    assert check.verdict is PROBLEM
    assert "127.0.0.1:1" in check.found and "hidden" not in str(check)


def test_a_store_that_keeps_nothing(redis_url: str) -> None:
    there, *rest = store_checks.store(Settings(redis_url=redis_url))
    assert there.verdict is OK
    assert [check.remedy for check in rest] == ["set appendonly yes, with appendfsync everysec"]


def test_a_usable_store_passes_its_check() -> None:
    kept = {"redis_version": "7.2", "aof_enabled": 1}
    assert [check.verdict for check in store_checks.judge("here", kept, 0.001, 0.1)] == [OK]
    far, ahead = store_checks.judge("here", kept, 0.02, 2.5)[1:]
    assert "20 ms" in far.found and "2.5 s ahead" in ahead.found
    (full,) = store_checks.judge("here", kept | {"used_memory": 90 * 2**20, "maxmemory": 100 * 2**20}, 0.001, 0.0)[1:]
    assert "90 of at most 100 MiB" in full.found


def test_a_store_that_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(url: str) -> None:
        raise StoreUnavailable("its maxmemory-policy is allkeys-lru")

    monkeypatch.setattr(store_checks, "_connect", refused)
    (check,) = store_checks.store(Settings(redis_url="redis://here"))
    assert check.verdict is PROBLEM
    assert "allkeys-lru" in check.found


@pytest.mark.parametrize(
    ("url", "place"),
    [("redis://:p@h/0", "h:6379"), ("rediss://u:p@h:7/0", "h:7"), ("unix:///run/redis.sock?db=1", "/run/redis.sock")],
)
def test_where_a_store_is(url: str, place: str) -> None:
    assert store_checks.address(url) == place
