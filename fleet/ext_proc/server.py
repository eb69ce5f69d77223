"""Runs an endpoint picker: a gRPC server that picks an endpoint for each request of a gateway.

The protocol is Envoy's external processing, as the Gateway API inference extension's endpoint picker protocol uses it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fleet.ext_proc.endpoint import PickEndpoint
from fleet.ext_proc.exchange import GatewayExchange
from fleet.ext_proc.messages import (
    KIND,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from fleet.process import FleetOptions, FleetProcess, Serving, announcement, run
from gateway.admin.port import AdminPort, open_admin_port
from gateway.background import wait_awake
from gateway.errors import ShuttingDown
from gateway.http.request_scope import ActiveRequests
from gateway.http.server import END_SECONDS, ListenError, on_signals
from gateway.settings.settings import Settings

log = logging.getLogger(__name__)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2
MIN_MESSAGE_BYTES = 4 * 2**20  # gRPC's default


def handlers(serving: Serving, is_ready: Callable[[], bool]) -> list[Any]:
    """The handlers of a gRPC server: exchanges, and health checks."""

    async def process(_: object, context: Any) -> None:
        async def read() -> Any:
            try:
                message = await context.read()
            except DecodeError:  # the sender is no gateway
                return None
            return None if message is grpc.aio.EOF else message

        first = await read()
        if first is not None and first.WhichOneof(KIND) == "request_headers":
            exchange = GatewayExchange(first, read, context.write)
            await PickEndpoint(serving.services, exchange)(exchange.scope, exchange.receive, exchange.send)

    health: Mapping[str, Callable[[], bool]] = {
        **dict.fromkeys(("", "readiness", EXT_PROC), is_ready),
        "liveness": lambda: True,
    }

    async def check(request: Any, context: Any) -> Any:
        if request.service not in health:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {', '.join(sorted(health))}")
        return HealthCheckResponse(status=SERVING if health[request.service]() else NOT_SERVING)

    processing = grpc.stream_stream_rpc_method_handler(
        process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
    )
    checking = grpc.unary_unary_rpc_method_handler(
        check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    )
    return [
        grpc.method_handlers_generic_handler(EXT_PROC, {"Process": processing}),
        grpc.method_handlers_generic_handler(HEALTH, {"Check": checking}),
    ]


def run_picker(settings: Settings, options: FleetOptions, announce: Callable[[str], object]) -> int:
    """Pick until a signal. Returns the exit status; raises any error before serving."""
    process = FleetProcess(settings, options)
    with open_admin_port(settings) as admin:
        run(_Picker(process, announce).serve(admin))
    log.info("stopped")
    return 0


class _Picker:
    """A picker that ends as a router does: it serves on for `drain_delay` while not ready; then exchanges have
    `drain_timeout` to end by themselves. A second signal ends all at once.
    """

    def __init__(self, process: FleetProcess, announce: Callable[[str], object]) -> None:
        self._process, self._announce = process, announce
        self._signals = asyncio.Queue[None]()
        self._is_draining = False

    async def serve(self, admin: AdminPort | None) -> None:
        settings = self._process.settings
        async with self._process.watching(admin, self._is_ready) as serving:
            server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=settings.max_connections)
            server.add_generic_rpc_handlers(handlers(serving, self._is_ready))
            port = _listen(server, settings)
            await server.start()
            self._announce(announcement(settings, "picks endpoints", "grpc", port, admin))
            with on_signals(lambda: self._signals.put_nowait(None)):
                await self._signals.get()
                self._is_draining = True
                log.info("draining")
                await self._drain(server, self._process.active_requests)

    def _is_ready(self) -> bool:
        return self._process.fleet.has_heard and not self._is_draining

    async def _drain(self, server: Any, active_requests: ActiveRequests) -> None:
        settings, hurry = self._process.settings, asyncio.create_task(self._signals.get())
        await wait_awake(settings.drain_delay, hurry)
        active_requests.close()
        stopped = asyncio.create_task(server.stop(settings.drain_timeout + END_SECONDS))
        await wait_awake(settings.drain_timeout, hurry, stopped)
        active_requests.fail_all(ShuttingDown())
        await wait_awake(END_SECONDS, stopped)
        await server.stop(None)
        hurry.cancel()


def _options(settings: Settings) -> list[tuple[str, int]]:
    largest = max(MIN_MESSAGE_BYTES, settings.max_body_bytes)  # a gateway may send a body in one piece
    return [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", largest)]


def _listen(server: Any, settings: Settings) -> int:
    """Bind the port and return its number. Raises `ListenError`."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        if settings.tls_cert_file is None or settings.tls_key_file is None:
            return int(server.add_insecure_port(address))
        pair = settings.tls_key_file.read_bytes(), settings.tls_cert_file.read_bytes()
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
    except RuntimeError:
        raise ListenError(
            f"{address} cannot be bound: it is in use, or no address of this machine, or needs privileges: choose "
            "another with --host and --port"
        ) from None
