"""Makes everything that lives as long as the server, and runs it."""

import asyncio
import gc
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tqdm import tqdm

from admission.admission import Admission
from backend.config import Batching, KVAllocation
from backend.engine import Engine
from backend.executor import Executor
from backend.loader import LoadedModel, load_model
from backend.sizing import EngineOptions
from gateway.announcement import Ready
from gateway.beside import beside
from gateway.connection import Connection, bound_socket
from gateway.core import open_core
from gateway.endpoints import (
    DetokenizeEndpoint,
    HealthEndpoint,
    LimitsEndpoint,
    MetricsEndpoint,
    ModelsEndpoint,
    TokenizeEndpoint,
)
from gateway.entitlement import Entitlements, KvShape
from gateway.errors import ApiError, InternalError, MethodNotAllowed, RouteNotFound, ShuttingDown
from gateway.generation import ChatEndpoint, CompletionEndpoint
from gateway.kv_leases import KvLeases
from gateway.metrics import Metrics
from gateway.openai import Limits
from gateway.responses import request_id
from gateway.scope import Lives
from gateway.service import Service
from gateway.settings import Settings
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.watched_core import WatchedCore
from gateway.tenancy import Tenancy, open_quotas, open_tenancy

log = logging.getLogger(__name__)

DRAIN_SECONDS = 30
GC_THRESHOLDS = (50_000, 20, 100)  # a request makes thousands of objects, and hardly ever a cycle
SWITCH_INTERVAL = 1e-4  # seconds; torch on a CPU re-takes the interpreter lock at every op

Announce = Callable[[Ready], object]


def run(settings: Settings, announce: Announce) -> int:
    """Serve until told to stop. Returns the exit status; raises what makes serving impossible, before the port opens.

    `announce` is called once, when requests are accepted.
    """
    sock = bound_socket(settings.host, settings.port)
    with sock, open_tenancy(settings) as tenancy:
        model = _load(settings)
        ready = _ready(settings, model, sock, tenancy.keys.demo_key)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(settings, model, model.runner, tenancy, sock, lambda: announce(ready)))


async def serve(
    settings: Settings,
    model: LoadedModel,
    executor: Executor,
    tenancy: Tenancy,
    sock: socket.socket,
    on_started: Callable[[], object],
) -> int:
    """Run one engine and its gateway on this loop; 1 when the device failed."""
    with open_core(settings, model) as core:
        engine = Engine(core, executor, model.engine_config.steps_in_flight)
        try:
            return await serve_engine(settings, model, engine, core, tenancy, sock, on_started)
        finally:
            await engine.stop()
            model.tokenizer.close()


async def serve_engine(
    settings: Settings,
    model: LoadedModel,
    engine: Engine,
    core: WatchedCore,
    tenancy: Tenancy,
    sock: socket.socket,
    on_started: Callable[[], object],
) -> int:
    """Run the gateway over an engine until a signal, or the engine's failure, ends it."""
    lives = Lives(settings.write_timeout)
    server = Server(settings, lives, on_started)
    async with open_quotas(settings, tenancy.store_url) as quotas:
        admission = Admission(engine, core)
        block_bytes = model.kv_bytes // model.engine_config.num_blocks
        kv_leases = KvLeases(quotas.store, admission, block_bytes, engine.clock)
        metrics = Metrics(served_name(settings), core.scheduler, engine.clock, tenancy.policies)
        telemetry = Telemetry(engine.clock)
        telemetry.on_end.append(metrics.request_ended)
        service = Service(
            model=served_name(settings),
            created=int(time.time()),
            end_tokens=model.end_tokens,
            limits=Limits(model.config.vocab_size, model.engine_config.max_model_len, model.sampling_defaults),
            default_max_tokens=settings.default_max_tokens,
            tokenizer=model.tokenizer,
            admission=admission,
            keys=tenancy.keys.ring,
            policies=tenancy.policies,
            entitlements=Entitlements(tenancy.policies),
            quotas=quotas,
            kv_leases=kv_leases,
            kv_shape=KvShape(model.engine_config.block_size, block_bytes),
            metrics=metrics,
            telemetry=telemetry,
            watched=core,
            lives=lives,
            max_body_bytes=settings.max_body_bytes,
            body_timeout=settings.body_timeout,
            seeds=random.Random(settings.seed),
        )
        server.config.app = make_app(
            service, lambda: not engine.failed.done(), lambda: not (engine.failed.done() or server.should_exit)
        )
        engine.failed.add_done_callback(lambda _: setattr(server, "should_exit", True))
        engine.start()
        await tenancy.enforce(admission)
        async with beside(lives.sweep(), tenancy.watch(), kv_leases.run()):
            await server.serve(sockets=[sock])
    return 1 if engine.failed.done() else 0


def make_app(service: Service, alive: Callable[[], bool], ready: Callable[[], bool]) -> ASGIApp:
    """The routes. Every answer that is not one of the endpoints' is an error of the same shape."""
    chat, completion = ChatEndpoint(service), CompletionEndpoint(service)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/models", ModelsEndpoint(service), methods=["GET"]),
        Route("/v1/models/{model:path}", ModelsEndpoint(service), methods=["GET"]),
        Route("/v1/limits", LimitsEndpoint(service), methods=["GET"]),
        Route("/tokenize", TokenizeEndpoint(service), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(service), methods=["POST"]),
        Route("/livez", HealthEndpoint(service, alive), methods=["GET"]),
        Route("/readyz", HealthEndpoint(service, ready, partial(_readiness, service)), methods=["GET"]),
        Route("/metrics", MetricsEndpoint(service), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted})
    app.router.redirect_slashes = False
    return Shortcut(app, {("POST", "/v1/chat/completions"): chat, ("POST", "/v1/completions"): completion})


class Shortcut:
    """Hands the routes that carry the load straight to their endpoints, which need no middleware: they answer whatever
    happens.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoints.get((scope["method"], scope["path"]), self._app)(scope, receive, send)


def _readiness(service: Service) -> dict[str, object]:
    """What an operator should know of a server that is ready; the log has the rest."""
    policies, store = service.policies, service.quotas.store
    problem = "the edited policy is not valid, so the last valid one stays: see the log" if policies.problem else None
    return {
        "policy": {"version": policies.current.version, "problem": problem},
        "quota_store": "connected" if store.is_connected else "unavailable",
    }


class Server(uvicorn.Server):
    """Uvicorn with our connections: says when it has started, and what it could not finish is told so."""

    def __init__(self, settings: Settings, lives: Lives, on_started: Callable[[], object]) -> None:
        limits = {"header_timeout": settings.header_timeout, "max_connections": settings.max_connections}
        super().__init__(
            uvicorn.Config(
                app=_nothing,
                http=type("LimitedConnection", (Connection,), limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=settings.idle_timeout,  # type: ignore[arg-type]  # seconds; a float works
                timeout_graceful_shutdown=DRAIN_SECONDS + 5,
                ssl_certfile=settings.tls_cert_file,
                ssl_keyfile=settings.tls_key_file,
            )
        )
        self._lives = lives
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal drains, the second ends now. Uvicorn would raise it again before `serve` has cleaned up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._lives.end_all, ShuttingDown())
        await super().shutdown(sockets)
        late.cancel()


async def _nothing(scope: object, receive: object, send: object) -> None:
    """Stands in for the application until it is made."""


async def _unrouted(request: StarletteRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    failure: ApiError = InternalError("The server failed to answer this request.")
    if error.status_code == 404:
        failure = RouteNotFound(f"Unknown request URL: {request.method} {path:.200}.")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        failure = MethodNotAllowed(f"{path:.200} does not answer {request.method}; use {allowed}.", allowed)
    headers = failure.headers() | {"x-request-id": request_id(request.scope["headers"]).decode()}
    return Response(failure.to_body(), failure.status, headers)


def served_name(settings: Settings) -> str:
    """What clients call the model: a directory goes by its own name, not by its path."""
    if settings.served_model_name:
        return settings.served_model_name
    directory = Path(settings.model).expanduser()
    return directory.resolve().name if directory.is_dir() else settings.model


def _load(settings: Settings) -> LoadedModel:
    torch.set_num_threads(settings.threads)
    sys.setswitchinterval(SWITCH_INTERVAL)
    options = EngineOptions(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        prefill_chunk=settings.prefill_chunk,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory_bytes,
        kv_memory_fraction=settings.kv_memory_fraction,
        batching=Batching(settings.batching),
        kv_allocation=KVAllocation(settings.kv_allocation),
    )
    with tqdm(unit="B", unit_scale=True, desc="loading weights", disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        model = load_model(
            settings.model,
            options,
            dtype=settings.dtype,
            device=settings.device,
            kernels=settings.kernels,
            progress=progress,
        )
    model.runner.warm_up()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    return model


def _ready(settings: Settings, model: LoadedModel, sock: socket.socket, demo_key: str | None) -> Ready:
    config = model.engine_config
    return Ready(
        version=version("sluice"),
        host=settings.host,
        port=sock.getsockname()[1],
        tls=settings.tls_cert_file is not None,
        model=served_name(settings),
        num_parameters=model.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.runner.device),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        kv_bytes=model.kv_bytes,
        max_model_len=config.max_model_len,
        demo_key=demo_key,
    )
