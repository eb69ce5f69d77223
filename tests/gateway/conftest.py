from collections.abc import Iterator

import pytest
from redis import Redis

from tests.quotas.servers import BINARIES, running


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(BINARIES["valkey"], tmp_path_factory.mktemp("quotas")) as url:
        yield url


@pytest.fixture
def redis_url(_server: str) -> str:
    """A store that knows nothing yet."""
    with Redis.from_url(_server) as client:
        client.flushall()
    return _server
