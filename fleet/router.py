"""Makes everything that lives as long as a router, and runs it."""

import asyncio
import gc
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from ssl import create_default_context

import uvloop
from starlette.types import ASGIApp

from fleet.app import Probe, RouterApp
from fleet.endpoint import RouterServices
from fleet.fleet import Fleet
from fleet.membership import Membership
from fleet.metrics import RouterMetrics, fleet_report
from fleet.picker import Knowledge, Routing, make_picker
from fleet.poller import Poller
from fleet.prefix_map import PrefixMap
from fleet.retries import RetryBudget
from fleet.upstream import make_client
from gateway.admin.app import AdminApp
from gateway.admin.endpoint import AdminRequest, Json, admin_route
from gateway.admin.port import AdminPort, admin_secret, open_admin_port
from gateway.admin.server import AdminServer, serving
from gateway.api.body_reader import open_body_reader
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.background import beside
from gateway.http.request_scope import ActiveRequests
from gateway.http.server import Server, check_tls, open_port
from gateway.settings.machine import GC_THRESHOLDS
from gateway.settings.settings import Settings
from gateway.telemetry.logs.request_log import RequestLog
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.effective_policy import EffectivePolicies
from gateway.tenants.key_source import KeySource
from gateway.tenants.live_policy import LivePolicy

log = logging.getLogger(__name__)

MAX_IDS = 2**20  # tokens of a context, more than any that is served


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """The options of a router besides the settings that it shares with a replica."""

    membership: Membership
    routing: Routing = Routing.PREDICTED
    state_interval: float = 0.1  # seconds between two questions for a replica's state
    ca_file: Path | None = None  # that signs the replicas' certificates; None: whom the system trusts


def run_router(settings: Settings, options: RouterOptions, announce: Callable[[str], object]) -> int:
    """Route until a signal. Returns the exit status; raises what makes that impossible, before the port opens."""
    check_tls(settings)
    policies = LivePolicy(settings.policy)
    keys = KeySource(settings, policies.current)
    with open_port(settings.host, settings.port) as sock, open_admin_port(settings) as admin:
        said = _announcement(settings, sock, admin)
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            router = _Router(settings, options, keys, policies, lambda: announce(said))
            runner.run(router.serve(sock, admin))
    log.info("stopped")
    return 0


class _Router:
    def __init__(
        self,
        settings: Settings,
        options: RouterOptions,
        keys: KeySource,
        policies: LivePolicy,
        on_started: Callable[[], object],
    ) -> None:
        self._settings, self._options = settings, options
        self._keys, self._policies = keys, policies
        prefixes = PrefixMap()
        knowledge = Knowledge(prefixes, lambda tenant: policies.current.tenant(tenant).weight)
        picker = make_picker(options.routing, knowledge, random.Random())
        self.fleet = Fleet(picker, prefixes, lambda: asyncio.get_running_loop().time())
        self._active_requests = ActiveRequests(settings.write_timeout)
        self._server = Server(settings, self._active_requests, on_started)

    async def serve(self, sock: socket.socket, admin: AdminPort | None) -> None:
        settings, clock = self._settings, self.fleet.clock
        keys, policies = self._keys, self._policies
        telemetry, budget = Telemetry(clock), RetryBudget()
        metrics = RouterMetrics(self.fleet, budget)
        telemetry.on_end += [metrics.ended, RequestLog(0)]
        trusted = create_default_context(cafile=self._options.ca_file)
        async with make_client(trusted) as client, open_body_reader(settings, MAX_IDS) as body_reader:
            services = RouterServices(
                keys=keys.ring,
                policies=EffectivePolicies(policies),
                telemetry=telemetry,
                active_requests=self._active_requests,
                refusals=RefusalLimiter(settings.refused_per_second, clock),
                fleet=self.fleet,
                budget=budget,
                client=client,
                body_reader=body_reader,
            )
            probes = self._probes(services)
            self._server.config.app = RouterApp(services, probes)
            poller = Poller(self.fleet, client, admin_secret(settings), self._options.state_interval)
            membership = self._options.membership.watch(self.fleet.set_replicas)
            async with (
                beside(policies.watch(), keys.watch(policies), membership),
                beside(poller.run(), self._active_requests.sweep()),
                self._admin_port(admin, probes, metrics),
            ):
                await self._server.serve(sockets=[sock])

    def _probes(self, services: RouterServices) -> Mapping[str, ASGIApp]:
        alive = Probe(services, lambda: True)
        ready = Probe(services, lambda: bool(self.fleet.available()) and not self._server.should_exit)
        return {"/startupz": alive, "/livez": alive, "/readyz": ready, "/health": ready, "/ping": ready}

    @asynccontextmanager
    async def _admin_port(
        self, port: AdminPort | None, probes: Mapping[str, ASGIApp], metrics: RouterMetrics
    ) -> AsyncIterator[None]:
        if port is None:
            yield
            return

        async def shown(_: AdminRequest) -> Json:
            return fleet_report(self.fleet)

        app = AdminApp(port.key, [admin_route("GET", "/admin/v1/fleet", shown)], {}, probes, metrics.text)
        async with serving(AdminServer(self._settings, app), port.sock):
            yield


def _announcement(settings: Settings, sock: socket.socket, admin: AdminPort | None) -> str:
    scheme = "https" if settings.tls_cert_file else "http"
    lines = [f"Sluice {version('sluice')} routes at {scheme}://{settings.host}:{sock.getsockname()[1]}"]
    if admin is not None:
        lines.append(f"  admin     {scheme}://{settings.admin_host}:{admin.number}")
    return "\n".join(lines)
