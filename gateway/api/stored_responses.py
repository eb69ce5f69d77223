"""The stored responses of tenants: kept at the end of an answer, read by the turns that follow, and by their clients.

A response is stored as what was asked and what was answered, sealed for its tenant. The contents of the turns before it
are stored with these. Items have ids that name their response, so that a client may refer to them.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import orjson
from starlette.datastructures import QueryParams

from admission.outcome import Outcome
from gateway import sse
from gateway.api.endpoint import Call, StoredEndpoint
from gateway.api.frontend import Frontend
from gateway.errors import BadRequest, ConcurrencyExceeded, ResponseNotFound
from gateway.openai.response_events import ResponseIdentity
from gateway.openai.response_items import item_id
from gateway.quoting import quoted
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.stored import Stored

Json = dict[str, Any]
T = TypeVar("T")

MAX_PAGE_ITEMS = 100  # items of a page
MAX_OPENED_BYTES = 2**25  # of the turns of one conversation
COMPRESSION_RATIO = 8  # assumed ratio of text to stored bytes
OPEN = ("queued", "in_progress")  # statuses of a response in the background that has not ended
EVENTS_LIFE_SECONDS = 600.0  # for which events can be read after they were sent
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.25, 1.0  # between looks for events, the longer the fewer come
RETRY_SECONDS = 2.0  # until a response in the background may have ended
CANCEL_LOOKS, CANCEL_LOOK_SECONDS = 40, 0.05  # until the replica that computes a response has ended it
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{48}")
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_AFTER = re.compile(r"-1|[0-9]{1,9}")
_ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-f]{48})[0-9a-f]{4}")


def response_of(item_id: str) -> str | None:
    """The response id within an item's id; None if there is none."""
    match = _ITEM_ID.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None


def given_items(identity: ResponseIdentity) -> list[Json]:
    """The input items of a response, with their ids."""
    return [{**item, "id": item_id(item["type"], identity.id, ordinal)} for ordinal, item in enumerate(identity.items)]


class Turn(NamedTuple):
    """One stored response, with its input items except those of earlier turns."""

    input: list[Json]
    response: Json


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of all tenants. Every call raises `ApiError` if the store does not answer."""

    frontend: Frontend

    async def keep(self, policy: EffectivePolicy, response: Mapping[str, Any], given: Sequence[Json]) -> Stored:
        """Store a response to the `given` input items. Raises `ApiError`."""
        contents = self.fitting(policy, response, given)
        if contents is None:
            return "too_large"
        return await self.put(policy, response["id"], response["previous_response_id"], contents)

    @staticmethod
    def fitting(policy: EffectivePolicy, response: Mapping[str, Any], given: Sequence[Json]) -> bytes | None:
        """The contents of a stored response; None if the tenant's bytes cannot hold them."""
        try:
            contents = orjson.dumps([given, response])
        except TypeError:  # nested more deeply than the library writes
            return None
        return contents if len(contents) <= policy.tenant.stored_responses.bytes else None

    async def put(
        self,
        policy: EffectivePolicy,
        name: str,
        previous: str | None,
        contents: bytes,
        replaced: str | None = None,
        life: float = inf,
    ) -> Stored:
        """Seal and store contents: see `EngineClient.store_response`."""
        if len(contents) > policy.tenant.stored_responses.bytes:  # before they are compressed
            return "too_large"
        seal = partial(self.frontend.sealer.seal, policy.name, name, contents)
        sealed = await self.frontend.body_reader.offload(policy.name, len(contents), seal)
        return await self.frontend.engine.store_response(policy, name, previous, sealed, replaced, life)

    async def get(self, tenant: str, name: str, parse: Callable[[bytes], T]) -> T | None:
        """Read, open and parse the contents stored under one name; None if there are none."""
        sealed = await self.frontend.engine.read_responses(tenant, name, True)
        if not sealed:
            return None

        def opened() -> T | None:
            contents = self.frontend.sealer.open(tenant, name, sealed[0], MAX_OPENED_BYTES)
            return None if contents is None else parse(contents)

        return await self.frontend.body_reader.offload(tenant, COMPRESSION_RATIO * len(sealed[0]), opened)

    async def read(self, tenant: str, name: str) -> Turn:
        """A response of the tenant. Raises `ResponseNotFound` alike for an unknown, a foreign and an expired one.

        One in the background whose replica is lost has failed: its events may have been read, and another answer would
        not go on with them.
        """
        turn = await self._read_as_stored(tenant, name)
        if turn.response["status"] in OPEN:
            state = await self.frontend.engine.open_response(tenant, "look", name)
            if state == "running":
                turn.response["status"] = "in_progress"
            if state != "lost":
                return turn
            turn = await self._read_as_stored(tenant, name)  # it may have ended since
            if turn.response["status"] in OPEN:
                told = "The replica that computed this response was lost: send the request again."
                turn.response["status"] = "failed"
                turn.response["error"] = {"code": "server_error", "message": told}
        return turn

    async def _read_as_stored(self, tenant: str, name: str) -> Turn:
        found = await self.turns(tenant, name, alone=True)
        if found is None:
            raise missing_response(name)
        return found[-1]

    async def cancel(self, tenant: str, name: str) -> Json:
        """Have a response in the background end, and return it. Raises `ApiError`."""
        response = (await self.read(tenant, name)).response
        if not response["background"]:
            raise BadRequest("Only a response in the background can be cancelled: this one has ended.", "response_id")
        for _ in range(CANCEL_LOOKS):
            if response["status"] not in OPEN:
                break
            await self.frontend.engine.open_response(tenant, "cancel", name)
            await asyncio.sleep(CANCEL_LOOK_SECONDS)
            response = (await self.read(tenant, name)).response
        return response

    async def events(self, tenant: str, name: str, after: int) -> AsyncGenerator[bytes]:
        """Yield the events of a response behind the number `after`, as they come, and in any case the last, which has
        the whole response: the others are gone some minutes after its end, and were never kept without a stream.
        """
        part, pause, is_open = 0, FIRST_LOOK_SECONDS, True
        while True:
            contents = await self.get(tenant, event_part(name, part), bytes)
            if contents is not None:
                part, pause = part + 1, FIRST_LOOK_SECONDS
                for event in contents.split(sse.END)[:-1]:
                    number = _SEQUENCE_NUMBER.search(event)
                    if number is not None and int(number[1]) > after:
                        after = int(number[1])
                        yield event + sse.END
                        if event.startswith(_LAST_EVENTS):
                            return
            elif not is_open:
                break
            elif is_open := await self.frontend.engine.open_response(tenant, "look", name) != "lost":
                await asyncio.sleep(pause)  # else a part may have come since it was read
                pause = min(2 * pause, LAST_LOOK_SECONDS)
        response = (await self.read(tenant, name)).response
        kinds = ["response.created"] if after < 0 else []  # without it, OpenAI's client knows no response
        for kind in [*kinds, f"response.{response['status']}"]:
            after += 1
            told = {"type": kind, "sequence_number": after, "response": response}
            yield sse.named_event(kind, orjson.dumps(told))

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
        engine = self.frontend.engine
        if not _RESPONSE_ID.fullmatch(name):
            raise missing_response(name)
        if await engine.open_response(tenant, "look", name) != "lost":
            raise BadRequest(f"The response {quoted(name)} has not ended: cancel it first.", "response_id")
        if not await engine.delete_response(tenant, name):
            raise missing_response(name)
        part = 0
        while await engine.delete_response(tenant, event_part(name, part)):
            part += 1

    async def items(self, tenant: str, name: str) -> dict[str, Json]:
        """The items of a stored response by id; empty if it is not stored."""
        turns = await self.turns(tenant, name, alone=True)
        items = [] if turns is None else [*turns[-1].input, *turns[-1].response["output"]]
        return {item["id"]: item for item in items}


_LAST_EVENTS = tuple(
    f"event: {kind}\n".encode() for kind in ("response.completed", "response.incomplete", "response.cancelled", "error")
)


def event_part(name: str, part: int) -> str:
    """The name under which a part of the events of a response is stored."""
    return f"{name}.{part}"


def too_many_open(most: int, what: str) -> ConcurrencyExceeded:
    return ConcurrencyExceeded(
        f"Your tenant's limit stored_responses.background is {most}, and as many {what}, or have the limit raised.",
        retry_after=RETRY_SECONDS,
    )


def missing_response(name: str) -> ResponseNotFound:
    return ResponseNotFound(f"There is no response {quoted(name)}: it was never stored, or has expired.")


class _ResponseEndpoint(StoredEndpoint):
    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._stored = StoredResponses(frontend)


class ResponseEndpoint(_ResponseEndpoint):
    """Answers GET and DELETE of one stored response, and GET of its events."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._followed = Counter[str]()  # event streams that are open or being opened, by tenant

    async def answer(self, call: Call) -> Outcome:
        asked = QueryParams(call.scope["query_string"])
        if call.scope["method"] == "DELETE" or asked.get("stream", "false").lower() != "true":
            return await super().answer(call)
        policy, name = self.frontend.policy(self.authenticate(call), "inference"), call.scope["path_params"]["response"]
        followed, most = self._followed, max(1, policy.tenant.stored_responses.background)
        if followed[policy.name] >= most:  # before the store is asked anything: refusals of many streams cost little
            raise too_many_open(most, "event streams of its responses are open: close one")
        after = asked.get("starting_after", "-1")
        if not _AFTER.fullmatch(after):
            raise BadRequest(
                f"starting_after must be the sequence number of an event, got {quoted(after, 40)}.", "starting_after"
            )
        followed[policy.name] += 1
        try:
            with closing(await self.charge(call, policy, in_passing=True)) as charge:
                await self._stored.read(policy.name, name)
                charge.was_served = True
            return await self._stream(call, self._stored.events(policy.name, name, int(after)))
        finally:
            followed[policy.name] -= 1

    async def _stream(self, call: Call, events: AsyncGenerator[bytes]) -> Outcome:
        """Send events as they come."""
        async with self.scoped(call) as scope, aclosing(events):
            async for event in events:
                await call.response.stream(event)
            await call.response.end_stream(b"")
        return scope.ended()

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        name = call.scope["path_params"]["response"]
        if call.scope["method"] == "DELETE":
            await self._stored.delete(policy.name, name)
            return {"id": name, "object": "response", "deleted": True}
        return (await self._stored.read(policy.name, name)).response


class InputItemsEndpoint(_ResponseEndpoint):
    """Answers GET /v1/responses/{response}/input_items with a page of them."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        items = (await self._stored.read(policy.name, call.scope["path_params"]["response"])).input
        by_id = {item["id"]: item for item in items}
        return page_of([*by_id], call, by_id.__getitem__)


def page_of(names: list[str], call: Call, item: Callable[[str], Json]) -> Json:
    """The page of items that the query of a call asks for. Their `names` come oldest first; `item` returns one."""
    asked = QueryParams(call.scope["query_string"])
    if asked.get("order", "desc") == "desc":
        names = [*reversed(names)]
    after = asked.get("after")
    start = names.index(after) + 1 if after in names else 0
    limit = int(asked["limit"][:4]) if re.fullmatch("[0-9]+", asked.get("limit", "")) else 20
    page = [item(name) for name in names[start : start + max(1, min(limit, MAX_PAGE_ITEMS))]]
    return listed(page, start, len(names))


def listed(page: list[Json], start: int, total: int) -> Json:
    """A page of items, of `total` with `start` before it."""
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < total,
    }


class CancelResponseEndpoint(_ResponseEndpoint):
    """Answers POST /v1/responses/{response}/cancel, for responses in the background."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        return await self._stored.cancel(policy.name, call.scope["path_params"]["response"])
