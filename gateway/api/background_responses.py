"""Responses in the background: each is computed in the task of the request that asked for it, which goes on when its
client has been answered, or has left.

Its engine, limits, queue and record are those of any request: it is refused at once where another would be, and counts
for its tenant's concurrency until it ends. Only its client is replaced by the store: the response as it is queued, then
as it has ended, and meanwhile, where it is streamed, its events. A lease in the store says that it is being computed;
when its replica is lost, all who look find it failed.
"""

import asyncio
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Self

import orjson
from starlette.types import Message, Send

from admission.outcome import Outcome
from gateway.api.endpoint import Call
from gateway.api.refusals import refusal_of
from gateway.api.stored_responses import EVENTS_LIFE_SECONDS, StoredResponses, event_part, given_items, too_many_open
from gateway.errors import ApiError, InternalError, Unsatisfiable
from gateway.http.request_scope import RequestScope, exchange_of
from gateway.openai.response_events import Json, ResponseIdentity
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.stored import Held

FLUSH_SECONDS = 0.25  # between writes of events to the store
FLUSHES_OF_LEASE = 4  # between its renewals, by which a cancellation is noticed
LAST_TRIES = 120  # to store how a response has ended, while the store is away, `FLUSH_SECONDS` apart
NO_ROOM = (
    "A response in the background has to be stored, and your tenant's limit stored_responses.bytes has no room for it: "
    "shorten it, or have the limit raised."
)


class StoredEvents:
    """Stores the events of a response in parts, which are numbered from 0."""

    def __init__(self, stored: StoredResponses, policy: EffectivePolicy, response: str) -> None:
        self._stored, self._policy, self._response = stored, policy, response
        self._events, self._part = bytearray(), b""  # not stored yet, and the part that is being stored
        self._num_parts = 0  # stored
        self._has_room = True

    def add(self, events: bytes) -> None:
        if self._has_room:
            self._events += events

    async def flush(self) -> bool:
        """Store the events since the last part as the next one. Returns False if there are none. Raises `ApiError`, and
        may be called again.
        """
        if not self._part:
            self._part, self._events = bytes(self._events), bytearray()
        if not self._part:
            return False
        name = event_part(self._response, self._num_parts)
        stored = await self._stored.put(self._policy, name, None, self._part, life=EVENTS_LIFE_SECONDS)
        self._has_room &= stored == "ok"  # else its last event alone can be read
        self._num_parts, self._part = self._num_parts + 1, b""
        return True


class BackgroundRun:
    """One response in the background: the block in which it is generated. Leaving the block stores how it has ended."""

    def __init__(
        self,
        stored: StoredResponses,
        call: Call,
        scope: RequestScope,
        policy: EffectivePolicy,
        identity: ResponseIdentity,
        is_streamed: bool,
    ) -> None:
        self._stored, self._call, self._scope = stored, call, scope
        self._policy, self._identity = policy, identity
        self._events = StoredEvents(stored, policy, identity.id) if is_streamed else None
        self._client: Send | None = None  # takes events, as long as it reads them
        self._queued: Json = {}  # the response before its first token
        self._keeping: asyncio.Task[None] | None = None  # once its client has been answered
        self._has_token = self._has_ended = self._is_cancelled = False

    async def __aenter__(self) -> Self:
        """Take a lease. Raises `ApiError` if the tenant has as many as it may, or no room, or the store is away."""
        most = self._policy.tenant.stored_responses.background
        if not most:
            told = "Your tenant's limit stored_responses.background is 0: leave background out, or have it raised."
            raise Unsatisfiable(told, "background")
        self._queued = self._identity.response([], status="queued")
        if self._stored.fitting(self._policy, self._queued, given_items(self._identity)) is None:
            raise Unsatisfiable(NO_ROOM, "background")
        if await self._ask("open", most) == "full":
            raise too_many_open(most, "responses in the background have not ended: cancel one")
        return self

    async def begin(self) -> None:
        """Store the response as queued, and answer the client. Raises `ApiError`."""
        identity, response, queued = self._identity, self._call.response, self._queued
        await self._store(queued, tries=1)
        self._scope.detach()
        if self._events is not None:
            self._client = self._call.send
            created = identity.event("response.created", response=queued)
            created += identity.event("response.queued", response=queued)
            await response.stream(created)
            self._events.add(created)
        else:
            await response.reply(orjson.dumps(queued))
        response.divert(self._send)
        self._keeping = asyncio.create_task(self._keep())

    async def _send(self, message: Message) -> None:
        """Take a part of the events, as ASGI has them."""
        if self._has_ended:
            return
        self._has_token = True
        if self._events is not None:
            self._events.add(message.get("body", b""))
        if self._client is not None:
            exchange = exchange_of(self._call.scope)
            if exchange is None or not exchange.is_paused:
                await self._client(message)
            else:  # it reads too slowly: the store has what it misses
                self._client = None
                exchange.abort()

    async def _keep(self) -> None:
        """Store events and renew the lease. Ends the response if it was cancelled, or the lease is lost."""
        for beat in count(1):
            await asyncio.sleep(FLUSH_SECONDS)
            with suppress(ApiError):  # the store is away: again at the next beat
                if self._events is not None:
                    await self._events.flush()
                if beat % FLUSHES_OF_LEASE:
                    continue
                state = await self._ask("run" if self._has_token else "hold")
                if state == "cancelled":
                    self._is_cancelled = True
                    self._scope.end(Outcome.DISCONNECTED)
                elif state == "lost":
                    self._scope.fail(InternalError("The lease of this response was lost: it counts as failed."))

    async def completed(self, response: Json) -> None:
        """Store the whole response. Raises `ApiError`."""
        if await self._ask("hold") == "lost":
            raise InternalError("The lease of this response was lost: it counts as failed.")
        await self._store(response)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            identity, failure = self._identity, self._scope.error
            if failure is None and isinstance(error, Exception):
                failure = refusal_of(error)
            with suppress(ApiError):  # else it is found lost, once its lease has run out
                if self._is_cancelled:
                    ended = await self._store_end(status="cancelled")
                    await self._call.response.end_stream(identity.event("response.cancelled", response=ended))
                elif failure is not None:
                    await self._store_end(error=failure)
                    await self._call.response.fail(failure)
                self._has_ended = True
                while self._events is not None and await self._events.flush():
                    pass
        with suppress(ApiError):
            await self._ask("close")

    async def _store_end(self, **how: Any) -> Json:
        """Store the response as it has ended early, without its items where the tenant has no room for them. Raises
        `ApiError`.
        """
        response = self._identity.response(self._identity.output, **how)
        try:
            await self._store(response)
        except Unsatisfiable:
            response = self._identity.response([], **how)
            await self._store(response)
        return response

    async def _store(self, response: Json, tries: int = LAST_TRIES) -> None:
        given = given_items(self._identity)
        for left in reversed(range(tries)):
            try:
                stored = await self._stored.keep(self._policy, response, given)
            except ApiError:
                if not left:
                    raise
                await asyncio.sleep(FLUSH_SECONDS)
            else:
                if stored != "ok":
                    raise Unsatisfiable(NO_ROOM, "background")
                return

    async def _ask(self, what: str, most: int = 0) -> Held:
        return await self._stored.frontend.engine.open_response(self._policy.name, what, self._identity.id, most)
