"""The stored responses of tenants: kept at the end of an answer, read by the turns that follow, and by their clients.

A response is stored as what was asked and what was answered, sealed for its tenant. The contents of the turns before it
are stored with these. Items have ids that name their response, so that a client may refer to them.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson
from starlette.datastructures import QueryParams

from admission.outcome import Outcome
from gateway.api.endpoint import Call, Endpoint
from gateway.api.frontend import Frontend
from gateway.errors import ApiError, BadRequest, ResponseNotFound
from gateway.quoting import quoted
from gateway.tenants.effective_policy import EffectivePolicy

Json = dict[str, Any]

MAX_PAGE_ITEMS = 100  # items of a page
MAX_OPENED_BYTES = 2**25  # of the turns of one conversation
COMPRESSION_RATIO = 8  # assumed ratio of text to stored bytes
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{48}")
_ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-f]{48})[0-9a-f]{4}")


def response_of(item_id: str) -> str | None:
    """The response id within an item's id; None if there is none."""
    match = _ITEM_ID.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None


class Turn(NamedTuple):
    """One stored response, with its input items except those of earlier turns."""

    input: list[Json]
    response: Json


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of all tenants. Every call raises `ApiError` if the store does not answer."""

    frontend: Frontend

    async def keep(self, policy: EffectivePolicy, response: Mapping[str, Any], given: Sequence[Json]) -> bool:
        """Store a response to the `given` input items. Returns False if the policy stores none, or has no room for it,
        or the store fails: the answer is sent all the same.
        """
        if not policy.tenant.stored_responses.bytes:
            return False
        name, previous = response["id"], response["previous_response_id"]
        try:
            contents = orjson.dumps([given, response])
        except TypeError:  # nested more deeply than the library writes
            return False
        if len(contents) > policy.tenant.stored_responses.bytes:  # before they are compressed
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
        """A response of the tenant. Raises `ResponseNotFound` alike for an unknown, a foreign and an expired one."""
        found = await self.turns(tenant, name, alone=True)
        if found is None:
            raise _missing(name)
        return found[-1]

    async def turns(self, tenant: str, name: str, *, alone: bool = False) -> list[Turn] | None:
        """A response and, unless `alone`, its predecessors, oldest first; None if one is missing."""
        if not _RESPONSE_ID.fullmatch(name):
            return None
        sealed = await self.frontend.engine.read_responses(tenant, name, alone)
        if sealed is None:
            return None
        opened = partial(self._opened, tenant, name, sealed)
        return await self.frontend.body_reader.offload(tenant, COMPRESSION_RATIO * sum(map(len, sealed)), opened)

    def _opened(self, tenant: str, name: str, sealed: Sequence[bytes]) -> list[Turn] | None:
        """Decrypt turns; the last is the response of this name."""
        turns: list[Turn] = []
        left = MAX_OPENED_BYTES
        for one in reversed(sealed):
            contents = self.frontend.sealer.open(tenant, name, one, left)
            if contents is None:
                return None
            left -= len(contents)
            turns.append(Turn(*orjson.loads(contents)))
            name = turns[-1].response["previous_response_id"] or ""
        return turns[::-1]

    async def delete(self, tenant: str, name: str) -> None:
        if not _RESPONSE_ID.fullmatch(name) or not await self.frontend.engine.delete_response(tenant, name):
            raise _missing(name)

    async def items(self, tenant: str, name: str) -> dict[str, Json]:
        """The items of a stored response by id; empty if it is not stored."""
        turns = await self.turns(tenant, name, alone=True)
        items = [] if turns is None else [*turns[-1].input, *turns[-1].response["output"]]
        return {item["id"]: item for item in items}


def _missing(name: str) -> ResponseNotFound:
    return ResponseNotFound(f"There is no response {quoted(name)}: it was never stored, or has expired.")


class ResponseEndpoint(Endpoint):
    """Answers GET and DELETE of one stored response. A call counts as a request and spends no tokens."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._stored = StoredResponses(frontend)

    async def answer(self, call: Call) -> Outcome:
        policy = self.frontend.policy(self.authenticate(call), "inference")
        with closing(await self.charge(call, policy)) as charge:
            body = orjson.dumps(await self._told(call, policy.name))
            charge.was_served = True
        return await self.complete(call, body)

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
        limit = int(asked["limit"][:4]) if asked.get("limit", "").isdecimal() else 20
        page = items[start : start + max(1, min(limit, MAX_PAGE_ITEMS))]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + len(page) < len(items),
        }


class CancelResponseEndpoint(ResponseEndpoint):
    """Answers POST /v1/responses/{response}/cancel with an error: only background responses can be cancelled, and there
    are none.
    """

    async def _told(self, call: Call, tenant: str) -> Json:
        await self._stored.read(tenant, call.scope["path_params"]["response"])
        raise BadRequest("Only a response in the background can be cancelled: this one has ended.", "response_id")
