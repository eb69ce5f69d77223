"""Stored responses and conversations, for later turns: by tenant, for a time, within its bytes. Contents are opaque.

A tenant has one hash and one sorted set, `sluice:{tenant}:responses` and `sluice:{tenant}:responses:order`
(lua/responses.lua), and for a minute the ids deleted last, `sluice:{tenant}:responses:done` (lua/once.lua). Another
tenant's response is answered as an unknown one. Beside them, `sluice:{tenant}:responses:open` has the leases under
which replicas compute responses in the background (lua/open_response.lua).
"""

from typing import cast

from quotas.policy.policy import StoredResponseLimits
from quotas.store.account import state_key
from quotas.store.scripts import Script, ScriptRunner
from quotas.stored import MAX_TURNS, Held, Stored


class ResponseStore:
    """The stored responses of all tenants. Every call may raise `StoreUnavailable` or `StoreFault`."""

    def __init__(self, runner: ScriptRunner, lease: float) -> None:
        """`lease` is in seconds, of responses in the background."""
        self._runner = runner
        self._lease = lease

    async def store(
        self,
        tenant: str,
        response: str,
        previous: str | None,
        contents: bytes,
        limits: StoredResponseLimits,
        replaced: str | None = None,
    ) -> Stored:
        """Store a response in place of the one of its id; with `replaced`, only if that is its previous one."""
        arguments = (response, previous or "", contents, round(limits.retention * 1e6), limits.bytes)
        status, replaced = "again", "*" if replaced is None else replaced
        while status == "again":  # the oldest make room, a part of them at a time, perhaps the replaced one
            status = (await self._ask(Script.STORE_RESPONSE, tenant, *arguments, replaced))[0].decode()
            replaced = "*"
        return cast(Stored, status)

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

    async def ask_lease(self, tenant: str, what: str, response: str, most: int = 0) -> Held:
        """Ask for the lease of a response in the background. Its replica takes it ("open"; "full" is said where the
        tenant has `most`), renews it ("hold", or "run" once there is a token) and gives it back ("close"); anyone may
        "look", or "cancel" it.
        """
        told = [str(one).encode() for one in (response, what, round(self._lease * 1e6), most)]
        key = f"{state_key(tenant)}:responses:open".encode()
        return cast(Held, (await self._runner.call(Script.OPEN_RESPONSE, (key,), *told))[0].decode())

    async def _ask(self, script: Script, tenant: str, *arguments: str | bytes | int) -> list[bytes]:
        key = f"{state_key(tenant)}:responses"
        words = [one if isinstance(one, bytes) else str(one).encode() for one in arguments]
        return await self._runner.call(script, (key.encode(), f"{key}:order".encode()), *words)
