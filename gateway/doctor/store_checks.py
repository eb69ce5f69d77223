"""Checks of the quota store: reachable, permitted, near, and durable."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redis import Redis
from redis.exceptions import RedisError

from gateway.doctor.check import Check, ok, problem, warning
from gateway.settings.settings import Settings
from quotas.embedded.errors import EmbeddedStoreError
from quotas.embedded.server_binary import find_server
from quotas.errors import QuotaError
from quotas.policy.units import show_wait
from quotas.store.redis_store import RedisStore

CONNECT_SECONDS = 3.0
NUM_PINGS = 5
FAR_SECONDS = 0.005  # each request waits for the store first
SKEW_SECONDS = 1.0  # between the store's clock and ours: limits run on its clock, expiry of keys on ours
NEARLY_FULL_SHARE = 0.8  # of maxmemory: with noeviction a full store refuses


def store(settings: Settings) -> list[Check]:
    if settings.redis_url is None:
        return [_embedded()]
    url = settings.redis_url.get_secret_value()
    try:
        asyncio.run(_connect(url))
        info, seconds, skew = _ask(url)
    except (QuotaError, RedisError, OSError, ValueError) as error:
        return [problem("store", f"{address(url)}: {error}", "see that it runs, and --redis-url")]
    return judge(address(url), info, seconds, skew)


def _embedded() -> Check:
    try:
        server = find_server()
    except EmbeddedStoreError as error:
        return problem("store", str(error))
    version = ".".join(map(str, server.version))
    return ok("store", f"a private server for this machine: {server.path.name} {version}")


async def _connect(url: str) -> None:
    """Connect as the gateway does; raises as it would."""
    store = RedisStore.at(url, CONNECT_SECONDS)
    try:
        await store.connect()
    finally:
        await store.close()


def _ask(url: str) -> tuple[Mapping[str, Any], float, float]:
    """INFO, the seconds of the quickest PING, and the server clock's lead in seconds."""
    with Redis.from_url(url, socket_timeout=CONNECT_SECONDS, socket_connect_timeout=CONNECT_SECONDS) as client:
        info: Mapping[str, Any] = client.info()
        seconds = min(_timed(client) for _ in range(NUM_PINGS))
        server, micros = client.time()
        return info, seconds, server + micros / 1e6 - time.time()


def _timed(client: Redis) -> float:
    began = time.perf_counter()
    client.ping()
    return time.perf_counter() - began


def judge(where: str, info: Mapping[str, Any], seconds: float, skew: float) -> list[Check]:
    """Judge a usable server: its good properties, and possible improvements."""
    version = info.get("valkey_version") or info.get("redis_version")
    name = "Valkey" if "valkey_version" in info else "Redis"
    checks = [ok("store", f"{name} {version} at {where}, {show_wait(seconds)} away, evicts nothing")]
    if not info.get("aof_enabled"):
        found = "it keeps no append-only log, so a crash sets tenants' budgets back to its last snapshot, or to nothing"
        checks.append(warning("store", found, "set appendonly yes, with appendfsync everysec"))
    if seconds > FAR_SECONDS:
        found = f"{where} answers after {show_wait(seconds)}, and every request waits for it"
        checks.append(warning("store", found, "put it nearer to the gateway"))
    if abs(skew) > SKEW_SECONDS:
        found = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} ours"
        checks.append(warning("store", found, "synchronise both by NTP"))
    used, most = info.get("used_memory", 0), info.get("maxmemory", 0)
    if most and used > NEARLY_FULL_SHARE * most:
        found = f"it uses {used / 2**20:,.0f} of at most {most / 2**20:,.0f} MiB"
        checks.append(warning("store", found, "raise its maxmemory: when it is full it refuses to count"))
    return checks


def address(url: str) -> str:
    """Return a store's address without its password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
