"""The stored responses of tenants: kept at the end of an answer, read by the turns that follow, and by their clients.

A response is stored as what was asked and what was answered, sealed for its tenant. The contents of the turns before it
are stored with these. Items have ids that name their response, so that a client may refer to them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from starlette.datastructures import QueryParams

from admission.outcome import Outcome
from gateway.api.endpoint import Call, Endpoint
from gateway.api.frontend import Frontend
from gateway.errors import ApiError, BadRequest, ResponseNotFound
from gateway.tenants.effective_policy import EffectivePolicy

Json = dict[str, Any]

MAX_LISTED = 100  # items of a page
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{48}")
_ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-f]{48})[0-9a-f]{4}")


class Turn(NamedTuple):
    """One stored response: the items that it answers, besides those of earlier turns, and the response."""

    input: list[Json]
    response: Json


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of all tenants. Every call raises `ApiError` if the store does not answer."""

    frontend: Frontend

    async def keep(self, policy: EffectivePolicy, response: Mapping[str, Any], given: Sequence[Json]) -> bool:
        """Store a response to the `given` input items. Returns False where the policy stores none, or not as much, and
        where the store fails: the answer is there all the same.
        """
        if not policy.tenant.stored_responses.bytes:
            return False
        name, previous = response["id"], response["previous_response_id"]
        try:
            contents = orjson.dumps([given, response])
        except TypeError:  # nested more deeply than the library writes
            return False
        seal = self.frontend.sealer.seal
        sealed = await self.frontend.body_reader.offload(
            policy.name, len(contents), lambda: seal(policy.name, name, contents)
        )
        try:
            return await self.frontend.engine.store_response(policy, name, previous, sealed)
        except ApiError:
            return False

    async def read(self, tenant: str, name: str) -> Turn:
        """Returns a response of the tenant. Raises `ResponseNotFound` alike for one that never was, one of another
        tenant, and one whose time is over.
        """
        found = await self.turns(tenant, name, alone=True)
        if found is None:
            raise ResponseNotFound(f"There is no response {name[:80]!r}: it was never stored, or is not any more.")
        return found[-1]

    async def turns(self, tenant: str, name: str, *, alone: bool = False) -> list[Turn] | None:
        """Returns a response and, unless `alone`, all before it, the first one first; None if one is not there."""
        if not _RESPONSE_ID.fullmatch(name):
            return None
        sealed = await self.frontend.engine.read_responses(tenant, name, alone)
        if sealed is None:
            return None
        return await self.frontend.body_reader.offload(
            tenant, sum(map(len, sealed)), lambda: self._opened(tenant, name, sealed)
        )

    def _opened(self, tenant: str, name: str, sealed: Sequence[bytes]) -> list[Turn] | None:
        """Returns turns, the last of which is the response of this name."""
        turns: list[Turn] = []
        for one in reversed(sealed):
            contents = self.frontend.sealer.open(tenant, name, one)
            if contents is None:
                return None
            turns.append(Turn(*orjson.loads(contents)))
            name = turns[-1].response["previous_response_id"] or ""
        return turns[::-1]

    async def delete(self, tenant: str, name: str) -> None:
        if not _RESPONSE_ID.fullmatch(name) or not await self.frontend.engine.delete_response(tenant, name):
            raise ResponseNotFound(f"There is no response {name[:80]!r}: it was never stored, or is not any more.")

    async def item(self, tenant: str, item_id: str) -> Json | None:
        """Returns the item of this id, of a stored response; None if there is none."""
        match = _ITEM_ID.fullmatch(item_id)
        turns = await self.turns(tenant, f"resp_{match[1]}", alone=True) if match else None
        items = [] if turns is None else [*turns[-1].input, *turns[-1].response["output"]]
        return next((item for item in items if item["id"] == item_id), None)


class ResponseEndpoint(Endpoint):
    """Answers for one stored response. A call counts as a request and costs no tokens."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._stored = StoredResponses(frontend)

    async def answer(self, call: Call) -> Outcome:
        policy = self.frontend.policy(self.authenticate(call), "inference")
        charge = await self.charge(call, policy)
        try:
            await call.response.reply(orjson.dumps(await self._told(call, policy.name)))
            charge.was_served = True
        finally:
            charge.close()
        return Outcome.COMPLETED

    async def _told(self, call: Call, tenant: str) -> Json:
        name, method = call.scope["path_params"]["response"], call.scope["method"]
        if method == "DELETE":
            await self._stored.delete(tenant, name)
            return {"id": name, "object": "response", "deleted": True}
        return (await self._stored.read(tenant, name)).response


class InputItemsEndpoint(ResponseEndpoint):
    """Answers GET /v1/responses/{response}/input_items with a page of them."""

    async def _told(self, call: Call, tenant: str) -> Json:
        asked = QueryParams(call.scope["query_string"])
        items = (await self._stored.read(tenant, call.scope["path_params"]["response"])).input
        if asked.get("order", "desc") == "desc":
            items = items[::-1]
        names = [item["id"] for item in items]
        after = asked.get("after")
        start = names.index(after) + 1 if after in names else 0
        limit = int(asked["limit"]) if asked.get("limit", "").isdecimal() else 20
        page = items[start : start + max(1, min(limit, MAX_LISTED))]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + len(page) < len(items),
        }


class CancelResponseEndpoint(ResponseEndpoint):
    """Answers POST /v1/responses/{response}/cancel: only responses in the background can be cancelled, and there are
    none.
    """

    async def _told(self, call: Call, tenant: str) -> Json:
        await self._stored.read(tenant, call.scope["path_params"]["response"])
        raise BadRequest("Only a response in the background can be cancelled: this one has ended.", "response_id")
