"""Opens the quota store: the embedded one, or the configured one."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from gateway.background import beside
from gateway.settings.settings import Settings
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.errors import StoreUnavailable
from quotas.quotas import Quotas
from quotas.store.redis_store import RedisStore
from quotas.store.replica_name import ReplicaName

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 6  # within the time of a lease


@contextmanager
def open_store(settings: Settings) -> Iterator[str]:
    """Yield the URL of the quota store, by default the embedded one's. Raises `EmbeddedStoreError`."""
    if settings.redis_url is not None:
        yield settings.redis_url.get_secret_value()
        return
    with EmbeddedStore(settings.state_dir) as url:
        yield url


@asynccontextmanager
async def open_quotas(settings: Settings, url: str) -> AsyncIterator[Quotas]:
    """Connect to the store and renew this replica's leases while the block runs. Raises `StoreUnsuitable`.

    A store that does not answer yet is an outage like any other.
    """
    name = ReplicaName.kept_in(settings.state_dir / "replicas")
    store = RedisStore.at(url, settings.redis_timeout, settings.quota_lease, name)
    try:
        await store.connect()
    except StoreUnavailable as error:
        log.error("serving without the quota store, as each tenant's policy says: %s", error)
    quotas = Quotas(store, settings.quota_lease / HEARTBEATS_PER_LEASE)
    try:
        async with beside(quotas.run()):
            yield quotas
    finally:
        await quotas.close()
