"""Runs a router: one address for several replicas."""

import logging
from collections.abc import Callable

from fleet.app import RouterApp
from fleet.process import FleetOptions, FleetProcess, announcement, run
from gateway.admin.port import open_admin_port
from gateway.http.server import Server, open_port
from gateway.settings.settings import Settings

log = logging.getLogger(__name__)


def run_router(settings: Settings, options: FleetOptions, announce: Callable[[str], object]) -> int:
    """Route until a signal. Returns the exit status; raises any error before the port opens."""
    process = FleetProcess(settings, options)
    with open_port(settings.host, settings.port) as sock, open_admin_port(settings) as admin:
        said = announcement(settings, "routes", "http", sock.getsockname()[1], admin)
        server = Server(settings, process.active_requests, lambda: announce(said))

        def is_ready() -> bool:
            return bool(process.fleet.available()) and not server.should_exit

        async def serve() -> None:
            async with process.watching(admin, is_ready) as (services, probes):
                server.config.app = RouterApp(services, probes)
                await server.serve(sockets=[sock])

        run(serve())
    log.info("stopped")
    return 0
