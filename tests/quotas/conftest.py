from collections.abc import AsyncIterator, Iterator

import pytest

from quotas.redis_store import RedisStore
from tests.quotas.servers import BINARIES, running


@pytest.fixture(scope="session", params=sorted(BINARIES))
def store_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(BINARIES[request.param], tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(BINARIES["valkey"], tmp_path_factory.mktemp("own")) as url:
        yield url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore.at(store_url, timeout=5)
    await store.connect()
    yield store
    await store.close()
