from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from quotas.store import zone_offsets
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner, load_scripts
from tests.quotas.servers import BINARIES, TEST_CLOCK, connected, running


@pytest.fixture(scope="session", params=sorted(BINARIES))
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(BINARIES[request.param], tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(BINARIES["valkey"], tmp_path_factory.mktemp("own")) as url:
        yield url


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own, to which anything may be done."""
    with running(BINARIES["valkey"], tmp_path) as url:
        yield url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisStore]:
    async with connected(store_url) as store:
        yield store


@pytest.fixture
async def other(store_url: str) -> AsyncIterator[RedisStore]:
    """A second replica."""
    async with connected(store_url) as store:
        yield store


@pytest.fixture
def tenant() -> str:
    return uuid4().hex


@pytest.fixture
async def runner(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptRunner]:
    """A connection to a store whose clock the test turns."""
    for name in ("DAYS_BEFORE", "DAYS_AFTER"):
        monkeypatch.setattr(zone_offsets, name, 10_000)  # the test's clock may be years off
    runner = ScriptRunner(valkey_url, 60, load_scripts({"clock": TEST_CLOCK}))
    await runner.client.connect()
    yield runner
    await runner.client.close()
