"""Which ledgers a server keeps, found by SCAN: a set of them would be one key, in another slot than the tenant's."""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from urllib.parse import unquote

from redis.exceptions import NoPermissionError

from quotas.account import PREFIX
from quotas.errors import StoreUnsuitable
from quotas.limit import EPOCH
from quotas.redis_client import RedisClient

PATTERN = f"{PREFIX}:{{*}}:usage:*".encode()
LEDGER = re.compile(rb"%b:\{([!-z|~]{1,192})\}:usage:([0-9]{1,6})" % PREFIX.encode())
PER_CALL = b"1000"  # keys that one SCAN looks at, so that others are not kept waiting


async def ledgers(client: RedisClient) -> list[tuple[str, date]]:
    """The tenants and the UTC days that have one. It reads the names of all keys of the server's database.

    Raises `StoreUnavailable`, and `StoreUnsuitable` where that is not permitted.
    """
    found: set[tuple[str, date]] = set()
    cursor = b"0"
    while True:
        try:
            cursor, names = await client.execute(b"SCAN", cursor, b"MATCH", PATTERN, b"COUNT", PER_CALL)
        except NoPermissionError as error:
            raise StoreUnsuitable(
                f"to find all tenants, the store's user needs the permission +scan: {error}"
            ) from error
        found.update(_named(names))
        if cursor == b"0":
            return sorted(found)


def _named(names: list[bytes]) -> Iterator[tuple[str, date]]:
    for name in names:
        if match := LEDGER.fullmatch(name):
            yield unquote(match[1].decode()), EPOCH + timedelta(days=int(match[2]))
