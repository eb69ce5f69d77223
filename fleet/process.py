"""Makes the parts that a router and an endpoint picker share, and keeps them up to date while they serve."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import create_default_context
from typing import NamedTuple

import uvloop
from starlette.types import ASGIApp

from fleet.admin.api import FleetApi
from fleet.admin.diagnosis import FleetDiagnosis
from fleet.admin.page_files import fleet_page
from fleet.app import Probe
from fleet.endpoint import FleetServices
from fleet.fleet import Fleet
from fleet.membership import Membership
from fleet.metrics import RouterMetrics
from fleet.picker import PICKERS, Knowledge, Routing
from fleet.poller import Poller
from fleet.prefix_map import PrefixMap
from fleet.retries import RetryBudget
from fleet.settlements import Settlements
from fleet.tracing import open_route_tracing
from fleet.upstream import make_client
from gateway.admin.app import AdminApp
from gateway.admin.audit_log import FILE, AuditLog
from gateway.admin.port import AdminPort, admin_secret
from gateway.admin.server import AdminServer, serving
from gateway.admin.sign_in import sign_in
from gateway.api.body_reader import open_body_reader
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.background import beside
from gateway.http.request_scope import ActiveRequests
from gateway.http.server import check_tls
from gateway.settings.machine import GC_THRESHOLDS
from gateway.settings.settings import Settings
from gateway.telemetry.logs.request_log import log_requests
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.effective_policy import EffectivePolicies
from gateway.tenants.key_source import KeySource
from gateway.tenants.live_policy import LivePolicy
from gateway.version import VERSION

MAX_IDS = 2**20  # tokens of a context, above any served one


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options at the edge of a fleet besides the settings that it shares with a replica."""

    membership: Membership
    routing: Routing = Routing.PREDICTED
    state_interval: float = 0.1  # seconds between polls of a replica's state
    ca_file: Path | None = None  # authority of the replicas' certificates; None: the system's


class Serving(NamedTuple):
    """The parts that serve while the fleet is watched."""

    services: FleetServices
    probes: Mapping[str, ASGIApp]  # by path


class FleetProcess:
    """The process of a router or picker. Raises `ListenError`, `PolicyError`, `KeyStoreError` before serving."""

    def __init__(self, settings: Settings, options: FleetOptions) -> None:
        check_tls(settings)
        self.settings = settings
        self.active_requests = ActiveRequests(settings.write_timeout)
        self._options = options
        self._policies = policies = LivePolicy(settings.policy)
        self._keys = KeySource(settings, policies.current)
        knowledge = Knowledge(PrefixMap(), lambda tenant: policies.current.tenant(tenant).weight)
        picker = PICKERS[options.routing](knowledge, random.Random())
        self.fleet = Fleet(picker, knowledge, lambda: asyncio.get_running_loop().time())

    @asynccontextmanager
    async def watching(self, admin: AdminPort | None, is_ready: Callable[[], bool]) -> AsyncIterator[Serving]:
        """Follow the policy, the keys and the replicas, and serve the admin port, while the block runs."""
        settings, clock = self.settings, self.fleet.clock
        telemetry, budget = Telemetry(clock), RetryBudget()
        metrics = RouterMetrics(self.fleet, budget)
        telemetry.on_end.append(metrics.ended)
        trusted = create_default_context(cafile=self._options.ca_file)
        async with (
            make_client(trusted) as client,
            open_body_reader(settings, MAX_IDS) as body_reader,
            open_route_tracing(settings, telemetry) as tracing,
            log_requests(telemetry, block_bytes=0),
            AsyncExitStack() as stack,
        ):
            settlements = Settlements(self.fleet, client, admin_secret(settings))
            stack.push_async_callback(settlements.close)
            metrics.count_losses(tracing)
            metrics.count_settlements(settlements)
            services = FleetServices(
                keys=self._keys.ring,
                policies=EffectivePolicies(self._policies),
                telemetry=telemetry,
                active_requests=self.active_requests,
                refusals=RefusalLimiter(settings.refused_per_second, clock),
                fleet=self.fleet,
                budget=budget,
                client=client,
                body_reader=body_reader,
                tracing=tracing,
                settlements=settlements,
            )
            probes = _probes(services, is_ready)
            poller = Poller(self.fleet, client, admin_secret(settings), self._options.state_interval)
            membership = self._options.membership.watch(self.fleet.set_replicas)
            async with (
                beside(self._policies.follow(), self._keys.follow(self._policies), membership),
                beside(poller.run(), self.active_requests.sweep()),
                self._admin_port(admin, services, probes, metrics),
            ):
                yield Serving(services, probes)

    @asynccontextmanager
    async def _admin_port(
        self, port: AdminPort | None, services: FleetServices, probes: Mapping[str, ASGIApp], metrics: RouterMetrics
    ) -> AsyncIterator[None]:
        if port is None:
            yield
            return
        budget, policies = services.budget, self._policies
        diagnosis = FleetDiagnosis(self.fleet, budget, services.client, admin_secret(self.settings))
        api = FleetApi(
            self.fleet,
            budget,
            diagnosis,
            lambda tenant: policies.current.tenant(tenant).weight,
            lambda: not self.active_requests.is_open,
        )
        async with sign_in(self.settings, port.keys, AuditLog(self.settings.state_dir / FILE)) as sign_in_paths:
            app = AdminApp(port.keys, api.routes(), fleet_page(), {**probes, **sign_in_paths}, metrics.text)
            async with serving(AdminServer(self.settings, app), port.sock):
                yield


def _probes(services: FleetServices, is_ready: Callable[[], bool]) -> Mapping[str, ASGIApp]:
    alive, ready = Probe(services, lambda: True), Probe(services, is_ready)
    return {"/startupz": alive, "/livez": alive, "/readyz": ready, "/health": ready, "/ping": ready}


def run(serving_: Coroutine[object, object, None]) -> None:
    """Run the server on a loop made for it, to its end."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving_)


def announcement(settings: Settings, does: str, scheme: str, port: int, admin: AdminPort | None) -> str:
    """The lines that announce its addresses."""
    tls = "s" if settings.tls_cert_file else ""
    lines = [f"Sluice {VERSION} {does} at {scheme}{tls}://{settings.host}:{port}"]
    if admin is not None:
        lines.append(f"  admin     http{tls}://{settings.admin_host}:{admin.number}")
    return "\n".join(lines)
