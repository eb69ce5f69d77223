"""The router's ASGI application: paths answered by replicas, and its own."""

import logging
import re
from collections.abc import Callable, Mapping

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from fleet.endpoint import FleetServices
from fleet.route_endpoint import RouteEndpoint, UploadEndpoint
from gateway.api import openapi
from gateway.errors import ApiError, MethodNotAllowed, RouteNotFound
from gateway.http.path import route_path
from gateway.http.responses import JSON_HEADERS, Headers, ResponseWriter

log = logging.getLogger(__name__)

MODELS = "/v1/models"
RESPONSE, FILE, BATCH = "/v1/responses/*", "/v1/files/*", "/v1/batches/*"
CONVERSATION = "/v1/conversations/*"
PAGES = {"/openapi.json": (openapi.written, JSON_HEADERS), "/docs": (openapi.page, openapi.HTML)}
ENCODING_PATHS = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")
_ONE = re.compile(r"/v1/(responses|conversations|files|batches)/[^/]+")
_ITEM = re.compile(r"(/v1/conversations/[^/]+/items)/[^/]+")
ROUTES = {  # with the scope required of a key; a replica checks again
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("POST", "/v1/responses"): "inference",
    ("GET", RESPONSE): "inference",
    ("DELETE", RESPONSE): "inference",
    ("GET", f"{RESPONSE}/input_items"): "inference",
    ("POST", f"{RESPONSE}/cancel"): "inference",
    ("POST", "/v1/conversations"): "inference",
    **{(verb, CONVERSATION): "inference" for verb in ("GET", "POST", "DELETE")},
    **{(verb, f"{CONVERSATION}/items"): "inference" for verb in ("GET", "POST")},
    **{(verb, f"{CONVERSATION}/items/*"): "inference" for verb in ("GET", "DELETE")},
    **{(verb, "/v1/files"): "inference" for verb in ("GET", "POST")},
    **{(verb, FILE): "inference" for verb in ("GET", "DELETE")},
    ("GET", f"{FILE}/content"): "inference",
    **{(verb, "/v1/batches"): "inference" for verb in ("GET", "POST")},
    ("GET", BATCH): "inference",
    ("POST", f"{BATCH}/cancel"): "inference",
    ("POST", "/v1/messages"): "inference",
    **{("POST", path): "inference" for path in ENCODING_PATHS},
    ("POST", "/v1/messages/count_tokens"): "inference",
    ("POST", "/tokenize"): "inference",
    ("POST", "/detokenize"): "inference",
    ("GET", MODELS): "inference",
    ("GET", "/tokenizer_info"): "inference",
    ("GET", "/v1/limits"): "limits",
}
UPLOAD = ("POST", "/v1/files")
MAKING = {UPLOAD, ("POST", "/v1/batches")}
"""Routes of requests that make something, each time that they are served."""


class Probe:
    """Answers GET of a probe: 200 while it holds, else 503. It needs no key."""

    def __init__(self, services: FleetServices, holds: Callable[[], bool]) -> None:
        self._services, self._holds = services, holds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holds = self._holds()
        body = orjson.dumps({"status": "ok" if holds else "unavailable"})
        await ResponseWriter(scope, send, self._services.telemetry.clock).reply(body, 200 if holds else 503)


class Page:
    """Answers GET of a page that says the same at every server of this version. It needs no key."""

    def __init__(self, services: FleetServices, written: Callable[[], bytes], headers: Headers) -> None:
        self._services, self._written, self._headers = services, written, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await ResponseWriter(scope, send, self._services.telemetry.clock).reply(self._written(), 200, self._headers)


class RouterApp:
    """Answers the tenants' port."""

    def __init__(self, services: FleetServices, probes: Mapping[str, ASGIApp]) -> None:
        self._services = services
        self._endpoints: dict[tuple[str, str], ASGIApp] = {
            route: (UploadEndpoint if route == UPLOAD else RouteEndpoint)(
                services, scope, is_repeatable=route not in MAKING
            )
            for route, scope in ROUTES.items()
        }
        self._endpoints |= {("GET", path): Page(services, *page) for path, page in PAGES.items()}
        self._endpoints |= {("GET", path): probe for path, probe in probes.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], route_path(scope)
        one_model = path.startswith(f"{MODELS}/") and len(path) > len(MODELS) + 1
        known = MODELS if one_model else _ONE.sub(r"/v1/\1/*", _ITEM.sub(r"\1/*", path), count=1)
        endpoint = self._endpoints.get((method, known))
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        allowed = ", ".join(sorted(verb for verb, route in self._endpoints if route == known))
        error: ApiError = RouteNotFound(f"Unknown request URL: {method} {path:.200}.")
        if allowed:
            error = MethodNotAllowed(f"{path:.200} does not answer {method}; use {allowed}.", allowed)
        await ResponseWriter(scope, send, self._services.telemetry.clock).fail(error)
