"""What each worker has of a gateway's bounds."""

import pytest

from gateway.settings.settings import Settings
from gateway.workers.worker_process import share


@pytest.mark.parametrize(("num_workers", "connections"), [(1, 100), (2, 50), (3, 34)])
def test_workers_divide_connections_and_unparsed_bytes_among_them(num_workers: int, connections: int) -> None:
    settings = Settings(http_workers=num_workers, max_connections=100)
    mine = share(settings)
    assert mine.max_connections == connections
    assert mine.max_unparsed_bytes >= 2 * settings.max_body_bytes
    assert mine.max_unparsed_bytes in (settings.max_unparsed_bytes // num_workers, 2 * settings.max_body_bytes)
    assert mine.drain_timeout == settings.drain_timeout
