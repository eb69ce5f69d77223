import signal
from collections.abc import Iterator

import pytest
from redis import Redis

from tests.gateway.stoppable_store import StoppableStore
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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppableStore]:
    """Runs, until the test does something about that."""
    store = StoppableStore(tmp_path_factory.mktemp("store") / "s")
    store.start()
    yield store
    store.signal(signal.SIGCONT)
    store.kill()
