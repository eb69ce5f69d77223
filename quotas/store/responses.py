"""Stored responses, for later turns: by tenant, for a time, within its bytes. Contents are opaque.

A tenant has one hash and one sorted set, `sluice:{tenant}:responses` and `sluice:{tenant}:responses:order`
(lua/responses.lua), and for a minute the ids deleted last, `sluice:{tenant}:responses:done` (lua/once.lua). Another
tenant's response is answered as an unknown one.
"""

from quotas.policy.policy import StoredResponseLimits
from quotas.store.account import state_key
from quotas.store.scripts import Script, ScriptRunner

MAX_TURNS = 256  # read of a conversation


class ResponseStore:
    """The stored responses of all tenants. Every call may raise `StoreUnavailable` or `StoreFault`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    async def store(
        self, tenant: str, response: str, previous: str | None, contents: bytes, limits: StoredResponseLimits
    ) -> bool:
        """Store a response, replacing one of the same id. Returns False if it alone exceeds the tenant's bytes."""
        arguments = (response, previous or "", contents, round(limits.retention * 1e6), limits.bytes)
        status = b"again"
        while status == b"again":  # the oldest make room, a part of them at a time
            (status,) = await self._ask(Script.STORE_RESPONSE, tenant, *arguments)
        return status == b"ok"

    async def read(self, tenant: str, response: str) -> bytes | None:
        """Return the contents of a response; None if there is none, or its time is over."""
        status, *contents = await self._ask(Script.READ_RESPONSE, tenant, response, 1)
        return contents[0] if status == b"ok" else None

    async def read_turns(self, tenant: str, response: str) -> list[bytes] | None:
        """The contents of a response and of its predecessors, oldest first; None if one is missing."""
        status, *contents = await self._ask(Script.READ_RESPONSE, tenant, response, MAX_TURNS)
        return contents[::-1] if status == b"ok" else None

    async def delete(self, tenant: str, response: str) -> bool:
        """Delete a response. Returns whether there was one; told the same if repeated within a minute."""
        (status,) = await self._ask(Script.DELETE_RESPONSE, tenant, response)
        return status == b"ok"

    async def _ask(self, script: Script, tenant: str, *arguments: str | bytes | int) -> list[bytes]:
        key = f"{state_key(tenant)}:responses"
        words = [one if isinstance(one, bytes) else str(one).encode() for one in arguments]
        return await self._runner.call(script, (key.encode(), f"{key}:order".encode()), *words)
