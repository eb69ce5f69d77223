"""The KV memory that all replicas together may hold for a tenant, leased to each in part."""

from quotas.account import state_key
from quotas.script_runner import ScriptRunner
from quotas.scripts import Script


class KvPool:
    """One per process. The leases of all replicas never add up to more than the limit that was last asked with."""

    def __init__(self, runner: ScriptRunner, replica: str, lease: float) -> None:
        """`lease` in seconds: how long what is granted lasts unless it is renewed."""
        self._runner = runner
        self._replica = replica.encode()
        self._lease = lease

    async def lease(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        """Lease up to `wanted` of `limit` bytes, instead of those granted before.

        Returns the bytes granted, and for how many seconds from this call on. Raises `StoreUnavailable`.
        """
        key = f"{state_key(tenant)}:kv".encode()
        numbers = (b"%d" % wanted, b"%d" % limit, b"%d" % round(self._lease * 1e6))
        answer = await self._runner.call(Script.LEASE_KV, (key,), self._replica, *numbers)
        return int(answer[0]), self._lease
