"""The tenants' routes, and the probes that every port answers."""

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.chat_dialect import ChatDialect
from gateway.api.conversations import make_conversation_routes
from gateway.api.dialects import CompletionDialect
from gateway.api.encoding_endpoints import make_encoding_endpoints
from gateway.api.endpoints import (
    CountTokensEndpoint,
    DetokenizeEndpoint,
    FailingEndpoint,
    HealthEndpoint,
    LimitsEndpoint,
    LoadsEndpoint,
    MetricsEndpoint,
    ModelInfoEndpoint,
    ModelsEndpoint,
    ServerInfoEndpoint,
    TokenizeEndpoint,
    TokenizerInfoEndpoint,
    VersionEndpoint,
)
from gateway.api.engine_client import ALIVE, READY, STARTED
from gateway.api.frontend import Frontend
from gateway.api.generation import GenerationEndpoint
from gateway.api.message_dialect import MessageDialect
from gateway.api.openapi import DocsEndpoint, OpenApiEndpoint
from gateway.api.response_dialect import ResponseDialect
from gateway.api.stored_responses import CancelResponseEndpoint, InputItemsEndpoint, ResponseEndpoint
from gateway.batches.endpoints import make_batch_routes
from gateway.errors import ApiError, InternalError, MethodNotAllowed, RouteNotFound
from gateway.http.path import route_path


def make_probes(frontend: Frontend) -> Mapping[str, ASGIApp]:
    """The probes of orchestrators, by path; every port answers them."""
    return {
        "/startupz": HealthEndpoint(frontend, STARTED),
        "/livez": HealthEndpoint(frontend, ALIVE),
        "/readyz": HealthEndpoint(frontend, READY, is_detailed=True),
        "/health": HealthEndpoint(frontend, READY),  # vLLM's and SGLang's, which routers and charts ask for
        "/ping": HealthEndpoint(frontend, READY),  # SageMaker's
    }


def make_app(frontend: Frontend, probes: Mapping[str, ASGIApp], has_metrics: bool = False) -> ASGIApp:
    """The application with the tenants' routes. Errors of unknown paths and methods have the shape of the endpoints'
    errors.
    """
    chat = GenerationEndpoint(frontend, ChatDialect())
    completion = GenerationEndpoint(frontend, CompletionDialect())
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/responses", GenerationEndpoint(frontend, ResponseDialect(frontend)), methods=["POST"]),
        Route("/v1/responses/{response}", ResponseEndpoint(frontend), methods=["GET", "DELETE"]),
        Route("/v1/responses/{response}/input_items", InputItemsEndpoint(frontend), methods=["GET"]),
        Route("/v1/responses/{response}/cancel", CancelResponseEndpoint(frontend), methods=["POST"]),
        *make_conversation_routes(frontend),
        *make_batch_routes(frontend),
        Route("/v1/messages", GenerationEndpoint(frontend, MessageDialect()), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokensEndpoint(frontend), methods=["POST"]),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in make_encoding_endpoints(frontend).items()),
        Route("/openapi.json", OpenApiEndpoint(frontend), methods=["GET"]),
        Route("/docs", DocsEndpoint(frontend), methods=["GET"]),
        Route("/v1/models", ModelsEndpoint(frontend), methods=["GET"]),
        Route("/v1/models/{model:path}", ModelsEndpoint(frontend), methods=["GET"]),
        Route("/v1/limits", LimitsEndpoint(frontend), methods=["GET"]),
        Route("/tokenize", TokenizeEndpoint(frontend), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(frontend), methods=["POST"]),
        Route("/tokenizer_info", TokenizerInfoEndpoint(frontend), methods=["GET"]),
        Route("/v1/loads", LoadsEndpoint(frontend), methods=["GET"]),
        *(Route(path, ServerInfoEndpoint(frontend), methods=["GET"]) for path in ("/server_info", "/get_server_info")),
        *(Route(path, ModelInfoEndpoint(frontend), methods=["GET"]) for path in ("/model_info", "/get_model_info")),
        Route("/version", VersionEndpoint(frontend), methods=["GET"]),
        *(Route(path, probe, methods=["GET"]) for path, probe in probes.items()),
    ]
    if has_metrics:
        routes.append(Route("/metrics", MetricsEndpoint(frontend), methods=["GET"]))
    unrouted: Any = partial(_unrouted, frontend)  # any ASGI application can be answered with, not only a Response
    app = Starlette(routes=routes, exception_handlers={HTTPException: unrouted})
    app.router.redirect_slashes = False
    shortcuts = {("POST", "/v1/chat/completions"): chat, ("POST", "/v1/completions"): completion}
    return Shortcut(app, shortcuts, frontend.cors)


class Shortcut:
    """Dispatches the hot routes straight to their endpoints, past the router's middleware.

    An endpoint answers every error itself. This is no coroutine, because every wake-up of a request would pass through
    it.
    """

    def __init__(
        self, app: ASGIApp, endpoints: Mapping[tuple[str, str], ASGIApp], preflight: ASGIApp | None = None
    ) -> None:
        """`preflight` answers the CORS preflight of browsers."""
        self._app = app
        self._endpoints = endpoints
        self._preflight = preflight

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._preflight is not None and scope["method"] == "OPTIONS":
            return self._preflight(scope, receive, send)
        return self._endpoints.get((scope["method"], route_path(scope)), self._app)(scope, receive, send)


async def _unrouted(frontend: Frontend, request: StarletteRequest, error: HTTPException) -> ASGIApp:
    path = request.scope["path"]
    failure: ApiError = InternalError("The server failed to answer this request.")
    if error.status_code == 404:
        failure = RouteNotFound(f"Unknown request URL: {request.method} {path:.200}.{_remedy(request)}")
    elif error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        failure = MethodNotAllowed(f"{path:.200} does not answer {request.method}; use {allowed}.", allowed)
    return FailingEndpoint(frontend, failure)


def _remedy(request: StarletteRequest) -> str:
    """A sentence for clients whose base URL has `/v1` once too rarely or too often."""
    path = route_path(request.scope)
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        scope = {**request.scope, "path": meant}
        if meant != path and any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return f" It is {meant:.200} here: correct the client's base URL."
    return ""
