"""Who may do what, and where it is kept what they have spent: all that an admin may change while the gateway serves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from admission.admission import Admission
from gateway.background import beside
from gateway.settings.settings import Settings
from gateway.tenants.file_watch import Watch
from gateway.tenants.key_source import KeySource
from gateway.tenants.live_policy import LivePolicy, terms_of
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.errors import StoreUnavailable
from quotas.policy.policy import Policy
from quotas.quotas import Quotas
from quotas.store.redis_store import RedisStore

log = logging.getLogger(__name__)

HEARTBEATS = 6  # in the life of a lease


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Made before the event loop, and used on it."""

    policies: LivePolicy
    keys: KeySource
    store_url: str

    async def enforce(self, admission: Admission) -> None:
        """Have the weights and classes of the policy hold, of this one and of those to come."""

        async def take(policy: Policy) -> None:
            admission.policy_changed(terms_of(policy))

        await take(self.policies.current)
        self.policies.on_change.append(take)

    async def watch(self) -> None:
        """Take up edits of the policy and of the keys since they were read, for as long as the server runs."""
        self.policies.on_change.append(self.keys.take_policy)
        watches = [Watch(source.files, source.reload, source.first_read) for source in (self.policies, self.keys)]
        await asyncio.gather(*(watch.run() for watch in watches))


@contextmanager
def open_tenancy(settings: Settings) -> Iterator[Tenancy]:
    """Raises `PolicyError`, `KeyStoreError` and `EmbeddedStoreError` for what cannot be served."""
    policies = LivePolicy(settings.policy)
    keys = KeySource(settings, policies.current)
    if settings.redis_url is not None:
        yield Tenancy(policies, keys, settings.redis_url.get_secret_value())
        return
    with EmbeddedStore(settings.state_dir) as url:
        yield Tenancy(policies, keys, url)


@asynccontextmanager
async def open_quotas(settings: Settings, url: str) -> AsyncIterator[Quotas]:
    """Raises `StoreUnsuitable`. A store that does not answer yet is an outage like any other."""
    store = RedisStore.at(url, settings.redis_timeout, settings.quota_lease)
    try:
        await store.connect()
    except StoreUnavailable as error:
        log.error("serving without the quota store, as each tenant's policy says: %s", error)
    quotas = Quotas(store, settings.quota_lease / HEARTBEATS)
    try:
        async with beside(quotas.run()):
            yield quotas
    finally:
        await quotas.close()
