"""Makes the admin plane of a gateway and runs it on its own port."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from importlib import import_module

from gateway.admin.actions import Actions
from gateway.admin.adapters import Adapters
from gateway.admin.api import Api
from gateway.admin.app import AdminApp
from gateway.admin.audit_log import FILE, AuditLog
from gateway.admin.bill import BillReader, MachinePrice
from gateway.admin.explanation import Explanations
from gateway.admin.history import History
from gateway.admin.logged_texts import LoggedTexts
from gateway.admin.overview import Process
from gateway.admin.page_files import page_files
from gateway.admin.policy_editor import PolicyEditor
from gateway.admin.port import AdminPort
from gateway.admin.recent_traffic import RecentTraffic
from gateway.admin.request_database import RequestDatabase
from gateway.admin.request_search import RequestLogReader
from gateway.admin.request_storage import FILE as REQUESTS_FILE
from gateway.admin.request_storage import RequestStorage, SqliteStorage
from gateway.admin.server import AdminServer, serving
from gateway.admin.sign_in import sign_in
from gateway.admin.what_if import WhatIfs
from gateway.api.service import Service
from gateway.background import beside
from gateway.core import core_config
from gateway.settings.settings import Settings
from gateway.telemetry.metrics.process import ProcessMetrics
from gateway.tenants.engine_hours import EngineHours
from gateway.tenants.key_source import KeySource


@asynccontextmanager
async def admin_plane(
    settings: Settings,
    service: Service,
    keys: KeySource,
    decoders: Sequence[Callable[[Sequence[int]], str]],
    process: Process,
    port: AdminPort | None,
) -> AsyncIterator[None]:
    """Serve the admin plane on its port while the block runs; without a port, nothing is served or recorded for it."""
    if port is None:
        yield
        return
    database = open_request_log(settings, service.metrics.process)
    texts = LoggedTexts(lambda: service.policies.current, decoders)
    history = History(service.telemetry, service.core.scheduler, service.core.share.accounts, database, texts)
    service.telemetry.on_end.append(history.request_ended)
    service.core_telemetry.on_step.append(history.step_completed)
    traffic = RecentTraffic(service.telemetry.live)
    service.telemetry.on_end.append(traffic.request_ended)
    audit = AuditLog(settings.state_dir / FILE)
    reader = RequestLogReader(database, time.time)
    editor = PolicyEditor(service.policies, audit, settings.policy_edits)
    what_ifs = WhatIfs(service, core_config(settings), traffic)
    price = None if settings.machine_price is None else MachinePrice.of(settings.machine_price)
    bill, adapters = BillReader(service, price), Adapters(service, settings.adapter_dir, audit)
    explanations = Explanations(settings.event_log)
    api = Api(process, service, history, audit, keys, what_ifs, reader, editor, bill, adapters, explanations)
    actions = Actions(api.requests, service.policies, audit, process.drain)
    service.policies.on_change.append(actions.policy_changed)
    service.policies.on_failure.append(actions.policy_rejected)
    keys.on_change.append(actions.keys_changed)
    await actions.started(len(keys.in_force))
    tasks = [history.run(), api.watch(), *([] if database is None else [database.run()])]
    if price is not None:
        accounts = service.core.share.accounts, service.core.ledger.spare.accounts
        tasks.append(EngineHours(accounts, service.quotas.store.ledger, service.telemetry.clock, _today).run())
    async with sign_in(settings, port.keys, audit) as sign_in_paths, beside(*tasks):
        public = {**process.probes, **sign_in_paths}
        app = AdminApp(port.keys, api.routes(actions), page_files(), public, service.metrics.prometheus_text)
        async with serving(AdminServer(settings, app), port.sock):
            yield
    if database is not None:
        await database.close()


def _today() -> date:
    return datetime.now(UTC).date()


def open_request_log(settings: Settings, metrics: ProcessMetrics) -> RequestDatabase | None:
    """The log of ended requests; None if the settings turn it off."""
    if not settings.request_log_bytes:
        return None
    if settings.request_log_url is None:
        storage: RequestStorage = SqliteStorage(settings.state_dir / REQUESTS_FILE, settings.request_log_bytes)
    else:
        postgres = import_module("gateway.admin.request_postgres")  # needs an extra
        storage = postgres.PostgresStorage(settings.request_log_url.get_secret_value(), settings.request_log_bytes)
    database = RequestDatabase(storage, settings.request_log_retention)
    metrics.bind("sluice.request_log.lost", lambda: database.num_lost)
    return database
