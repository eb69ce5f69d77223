"""Makes the admin plane of a gateway and runs it on its own port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.admin.actions import Actions
from gateway.admin.api import Api
from gateway.admin.app import AdminApp
from gateway.admin.audit_log import FILE, AuditLog
from gateway.admin.history import History
from gateway.admin.overview import Process
from gateway.admin.page_files import page_files
from gateway.admin.port import AdminPort
from gateway.admin.recent_traffic import RecentTraffic
from gateway.admin.server import AdminServer, serving
from gateway.admin.what_if import WhatIfs
from gateway.api.service import Service
from gateway.background import beside
from gateway.core import core_config
from gateway.settings.settings import Settings
from gateway.tenants.key_source import KeySource


@asynccontextmanager
async def admin_plane(
    settings: Settings,
    service: Service,
    keys: KeySource,
    process: Process,
    port: AdminPort | None,
) -> AsyncIterator[None]:
    """Serve the admin plane on its port while the block runs; without a port, nothing is served or recorded for it."""
    if port is None:
        yield
        return
    history = History(service.telemetry, service.core.scheduler, service.core.share.accounts)
    service.telemetry.on_end.append(history.request_ended)
    service.core_telemetry.on_step.append(history.step_completed)
    traffic = RecentTraffic(service.telemetry.live)
    service.telemetry.on_end.append(traffic.request_ended)
    audit = AuditLog(settings.state_dir / FILE)
    api = Api(process, service, history, audit, keys, WhatIfs(service, core_config(settings), traffic))
    actions = Actions(api.requests, service.policies, audit, process.drain)
    service.policies.on_change.append(actions.policy_changed)
    service.policies.on_failure.append(actions.policy_rejected)
    keys.on_change.append(actions.keys_changed)
    await actions.started(len(keys.in_force))
    app = AdminApp(port.key, api.routes(actions), page_files(), process.probes, service.metrics.prometheus_text)
    async with serving(AdminServer(settings, app), port.sock), beside(history.run()), beside(api.watch()):
        yield
