"""The admin port's ASGI application: checks the key, routes, and turns every failure into a typed answer."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from gateway.admin.admins import AdminKeys
from gateway.admin.endpoint import BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES, AdminRequest, Blob, admin_route
from gateway.errors import ApiError, InternalError, MethodNotAllowed, RouteNotFound
from gateway.http.request_scope import ClientGone, read_body, show_key
from gateway.http.responses import ResponseWriter, encode_headers
from gateway.telemetry.metrics.prometheus import CONTENT_TYPE

log = logging.getLogger(__name__)

METRICS = "/metrics"
LOADS = "/v1/loads"
ADMIN = "admin"  # tenant of all connections that have shown the key
HARDENING = encode_headers(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
)


class AdminApp:
    """Serves probes and the page's files without a key, and all else with an admin's key only."""

    def __init__(
        self,
        keys: AdminKeys,
        routes: Sequence[Route],
        page: Mapping[str, Blob],
        probes: Mapping[str, Callable[..., Any]],
        metrics: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._keys = keys
        self._metrics = metrics
        open_to_all: Mapping[str, Callable[..., Any]] = {**page, **probes}
        public = [Route(path, app, methods=["GET"]) for path, app in open_to_all.items()]
        self._routes = [admin_route("GET", METRICS, self._scrape), *routes, *public]
        self._router = Router(self._routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _hardened(send)
        response = ResponseWriter(scope, send, time.monotonic)
        try:
            await self._answer(scope, receive, send, response.request_headers.get(b"authorization"))
        except ClientGone:
            return
        except ApiError as error:
            await response.fail(error)
        except Exception as error:
            log.error("a request to the admin port failed", exc_info=error)
            await response.fail(InternalError("The gateway failed to answer this request. It has been logged."))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, authorization: bytes | None) -> None:
        needs_key = scope["path"] in (METRICS, LOADS) or scope["path"].startswith("/admin/")
        if needs_key:
            scope["user"] = self._keys.admin(authorization)
            show_key(scope, ADMIN)
        scope["app"] = self  # else starlette answers unrouted requests itself, in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException:
            if needs_key:
                await read_body(scope, receive, MAX_BODY_BYTES, BODY_TIMEOUT_SECONDS)
            raise self._unrouted(scope) from None

    async def _scrape(self, request: AdminRequest) -> Blob:
        return Blob(await self._metrics(), CONTENT_TYPE)

    def _unrouted(self, scope: Scope) -> ApiError:
        """An error that names all methods of a path: starlette itself would name those of its first route."""
        method, path = scope["method"], scope["path"]
        routes = [route for route in self._routes if route.matches(scope)[0] is Match.PARTIAL]
        if not routes:
            return RouteNotFound(f"Unknown request URL: {method} {path:.200}.")
        allowed = ", ".join(one for route in routes for one in route.methods or () if one != "HEAD")
        return MethodNotAllowed(f"{path:.200} does not answer {method}; use {allowed}.", allowed)


def _hardened(send: Send) -> Send:
    """Add the headers that restrict a browser to the page's needs."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *HARDENING]}
        await send(message)

    return sending
