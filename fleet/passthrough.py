"""Passes all requests of a foreign ASGI server, such as Ray Serve's, to one replica."""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

import httpx
from starlette.types import Message, Receive, Scope, Send

from fleet.child import ChildFailed, ChildReplica
from fleet.errors import ReplicaLost
from fleet.upstream import HOP_BY_HOP, Headers, send_on
from gateway.errors import ApiError
from gateway.http.request_scope import ClientGone, RequestScope, read_body
from gateway.http.responses import encode_headers, error_forms, sends_events
from gateway.sse import WholeEvents

_MADE_ANEW = HOP_BY_HOP - {b"content-length"} | {b"date", b"server", b"x-request-id"}  # set by the server before us


class Passthrough:
    """An ASGI application over a child process, which starts and stops with its lifespan.

    A request is handed on with its headers, the answer in the parts in which it comes. If the client leaves, the
    connection to the replica is closed, which ends the request there. A replica lost before its answer begins is an
    error with status 503, and afterwards an error event without [DONE]; an answer that is no stream of events is cut.
    """

    def __init__(self, replica: ChildReplica) -> None:
        self._replica = replica
        self._relaying = set[asyncio.Task[None]]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._replica.start()
        except ChildFailed as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._replica.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._replica.settings
        try:
            body = await read_body(scope, receive, settings.max_body_bytes, settings.body_timeout)
            async with RequestScope(scope, receive, send):
                await self._apart(self._relay(scope, send, body))
        except ClientGone:
            return
        except ApiError as error:
            status, reply = error_forms(scope["path"])[0](error)
            await send(_start(status, encode_headers(error.headers())))
            await send(_part(reply, more=False))

    async def _apart(self, relay: Coroutine[object, object, None]) -> None:
        """Run the relay as a task that is cancelled once, even if this one is cancelled again.

        Ray cancels a request whose client has left, and reports the disconnect as well. Closing a connection waits, and
        a cancellation in the middle of it would leave it open: the replica would go on without a client.
        """
        task = asyncio.create_task(relay)
        self._relaying.add(task)
        task.add_done_callback(self._relaying.discard)
        try:
            await asyncio.shield(task)
        finally:
            if not task.done():
                task.cancel()

    async def _relay(self, scope: Scope, send: Send, body: bytes) -> None:
        """Hand the request on, and its answer back. Raises `ReplicaLost` before the answer begins."""
        async with aclosing(await self._sent_on(scope, body)) as answer:
            parts, headers = answer.aiter_raw(), answer.headers
            is_whole = "content-length" in headers  # no part of it is handed on if the replica is lost
            try:
                first = b"".join([part async for part in parts]) if is_whole else await anext(parts, b"")
            except httpx.TransportError:
                raise ReplicaLost from None
            kept = [(name.lower(), value) for name, value in headers.raw if name.lower() not in _MADE_ANEW]
            events = WholeEvents() if sends_events(kept) else None
            await send(_start(answer.status_code, kept))
            await send(_part(first if events is None else events.add(first)))
            try:
                async for part in parts:
                    await send(_part(part if events is None else events.add(part)))
                await send(_part(b"" if events is None else events.rest, more=False))
            except httpx.TransportError:
                if events is not None:  # any other answer is left without its end, and so cut
                    await send(_part(error_forms(scope["path"])[1](ReplicaLost()), more=False))

    async def _sent_on(self, scope: Scope, body: bytes) -> httpx.Response:
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP_BY_HOP]
        try:
            return await send_on(self._replica.client, scope, self._replica.url, headers, body)
        except httpx.TransportError:
            raise ReplicaLost from None


def _start(status: int, headers: Headers) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
