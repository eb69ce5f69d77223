"""Connects a command to the quota store that the settings name, whether or not a gateway runs."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gateway.settings.settings import Settings
from quotas.embedded.embedded_store import EmbeddedStore
from quotas.errors import StoreUnavailable
from quotas.store.redis_store import RedisStore

T = TypeVar("T")

STORE_FLAGS = {
    "redis_url": "the gateways' quota store; auto: a gateway's private one in DIR",
    "state_dir": "the gateway's state directory, with its private store and its keys",
}
ANSWER_SECONDS = 5.0  # no request waits for this answer


def ask_store(settings: Settings, question: Callable[[RedisStore], Awaitable[T]]) -> T:
    """Run `question` on a connected store and return its result.

    The embedded store's server is the running gateway's, or is started for this call. Raises `QuotaError` and
    `EmbeddedStoreError`.
    """
    with _url(settings) as url:
        return asyncio.run(_answer(url, question))


@contextmanager
def _url(settings: Settings) -> Iterator[str]:
    if settings.redis_url is not None:
        yield settings.redis_url.get_secret_value()
        return
    folder = settings.state_dir / "store"
    if not folder.exists():
        raise StoreUnavailable(
            f"no quotas are kept here: there is no {folder}; name the gateway's --state-dir, or its --redis-url"
        )
    with EmbeddedStore(settings.state_dir) as url:
        yield url


async def _answer(url: str, question: Callable[[RedisStore], Awaitable[T]]) -> T:
    store = RedisStore.at(url, ANSWER_SECONDS)
    try:
        await store.connect()
        return await question(store)
    finally:
        await store.close()
