"""Whether a server may keep quotas: one that is too old, evicts or only replicates may not."""

import re

from redis.exceptions import NoPermissionError

from quotas.errors import StoreUnavailable, StoreUnsuitable
from quotas.redis_link import RedisLink
from quotas.resp import command

OLDEST = (6, 2)


async def check_server(link: RedisLink) -> None:
    """Raise `StoreUnsuitable` with the remedy, or `StoreUnavailable` of a server that replicates another."""
    answers = [link.submit(command(b"INFO", section)) for section in (b"server", b"memory", b"replication")]
    try:
        info = _parse(b"\n".join([await answer for answer in answers]))
    except NoPermissionError as error:
        raise StoreUnsuitable(f"the user of the quota store needs the permission +info: {error}") from error
    version = info.get("redis_version", "0.0")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise StoreUnsuitable(f"the quota store is Redis {version}: it must be 6.2 or later, or Valkey")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        raise StoreUnsuitable(
            f"the quota store may evict what tenants have spent: its maxmemory-policy is {policy}; "
            f"set it to noeviction, or use a server that is no cache"
        )
    if info.get("role") == "slave":
        raise StoreUnavailable("the quota store's address leads to a replica, which cannot be written to")


def _parse(text: bytes) -> dict[str, str]:
    lines = text.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
