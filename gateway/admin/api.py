"""The paths of the admin API: what each reads or changes.

Moments are in Unix seconds, durations in seconds, null is unknown. Lists are capped; `truncated` counts what is left
out. docs/admin.md describes each.
"""

import time
from typing import Any

from gateway.admin.actions import Actions
from gateway.admin.audit_log import AuditLog
from gateway.admin.diagnosis import Diagnosis
from gateway.admin.history import History
from gateway.admin.keys import Keys, NewKey, Rotation
from gateway.admin.live_requests import LiveRequests
from gateway.admin.overview import Process, Queue, kv_map, overview
from gateway.admin.policy import MAX_BODY_BYTES, PastedPolicy, PolicyCheck, policy_report
from gateway.admin.router import AdminRequest, Route, Router, TextAnswer
from gateway.admin.rows import Reasons, refusal_row
from gateway.admin.tenants import Tenants
from gateway.admin.usage import UsageReader
from gateway.admin.what_if import WhatIfs
from gateway.api.service import Service
from gateway.background import unhurried
from gateway.http.json_body import JsonBody
from gateway.http.wire import read
from gateway.tenants.key_source import KeySource

PREFIX = "/admin/v1"

Json = dict[str, Any]


class Api:
    """Reads the gateway as it is at the moment of each request; `actions` change it."""

    def __init__(
        self, process: Process, service: Service, history: History, audit: AuditLog, keys: KeySource, what_ifs: WhatIfs
    ) -> None:
        self._process = process
        self._service = service
        self._history = history
        self._audit = audit
        scheduler = service.core.scheduler
        reasons = Reasons(scheduler)
        self.requests = LiveRequests(service.telemetry, history, reasons)
        self._queue = Queue(scheduler, reasons)
        self._tenants = Tenants(service, history, self.requests)
        self._keys = Keys(keys, service.policies, audit)
        self._usage = UsageReader(service)
        self._what_ifs = what_ifs
        self._policy_check = PolicyCheck()
        self._diagnosis = Diagnosis(self._doctors_questions, service.metrics.prometheus_text, service.telemetry.clock)
        self.watch = self._diagnosis.watch

    def router(self, actions: Actions) -> Router:
        return Router(
            [
                Route("GET", f"{PREFIX}/overview", self.overview),
                Route("GET", f"{PREFIX}/tenants", self.tenants),
                Route("GET", f"{PREFIX}/tenants/{{name}}", self.tenant),
                Route("GET", f"{PREFIX}/requests", self.list_requests),
                Route(
                    "POST", f"{PREFIX}/requests/{{name}}/cancel", lambda visit: actions.cancel(visit.actor, visit.name)
                ),
                Route("GET", f"{PREFIX}/requests/{{name}}", self.request),
                Route("GET", f"{PREFIX}/queue", self.queue),
                Route("GET", f"{PREFIX}/kv", self.kv),
                Route("GET", f"{PREFIX}/policy", self.policy),
                Route("GET", f"{PREFIX}/policy/text", self.policy_text),
                Route("POST", f"{PREFIX}/policy/check", self.check_policy, MAX_BODY_BYTES),
                Route("POST", f"{PREFIX}/policy/what-if", self.what_if, MAX_BODY_BYTES),
                Route("POST", f"{PREFIX}/policy/reload", lambda visit: actions.reload(visit.actor)),
                Route("GET", f"{PREFIX}/keys", self.keys),
                Route("POST", f"{PREFIX}/keys", self.create_key),
                Route("POST", f"{PREFIX}/keys/{{name}}/rotate", self.rotate_key),
                Route("POST", f"{PREFIX}/keys/{{name}}/revoke", self.revoke_key),
                Route("GET", f"{PREFIX}/refusals", self.refusals),
                Route("GET", f"{PREFIX}/usage", self.usage),
                Route("GET", f"{PREFIX}/usage.csv", self.usage_csv),
                Route("GET", f"{PREFIX}/budgets", self.budgets),
                Route("GET", f"{PREFIX}/audit", self.audit),
                Route("GET", f"{PREFIX}/diagnosis", self.diagnosis),
                Route("POST", f"{PREFIX}/drain", lambda visit: actions.drain(visit.actor)),
            ]
        )

    async def overview(self, visit: AdminRequest) -> Json:
        return overview(self._process, self._service, self._history, time.time())

    async def tenants(self, visit: AdminRequest) -> Json:
        return await self._tenants.listed()

    async def tenant(self, visit: AdminRequest) -> Json:
        return await self._tenants.shown(visit.name)

    async def list_requests(self, visit: AdminRequest) -> Json:
        return await self.requests.listed()

    async def request(self, visit: AdminRequest) -> Json:
        return self.requests.shown(visit.name)

    async def queue(self, visit: AdminRequest) -> Json:
        now = self._service.telemetry.clock()
        return await self._queue.listed(self.requests.records(), self._service.policies.current, now)

    async def kv(self, visit: AdminRequest) -> Json:
        return await kv_map(self._service.core.scheduler, self._service.kv_shape.block_bytes)

    async def policy(self, visit: AdminRequest) -> Json:
        return await policy_report(self._service.policies)

    async def policy_text(self, visit: AdminRequest) -> Json:
        return await self._policy_check.text(self._service.policies.current)

    async def check_policy(self, visit: AdminRequest) -> Json:
        return await self._policy_check.of(read(PastedPolicy, JsonBody.of(visit.body)), self._service.policies.current)

    async def what_if(self, visit: AdminRequest) -> Json:
        return await self._what_ifs.of(read(PastedPolicy, JsonBody.of(visit.body)))

    async def keys(self, visit: AdminRequest) -> Json:
        return await self._keys.listed(visit.query.get("contains", ""))

    async def create_key(self, visit: AdminRequest) -> Json:
        return await self._keys.create(visit.actor, read(NewKey, JsonBody.of(visit.body)))

    async def rotate_key(self, visit: AdminRequest) -> Json:
        return await self._keys.rotate(visit.actor, visit.name, read(Rotation, JsonBody.of(visit.body or b"{}")))

    async def revoke_key(self, visit: AdminRequest) -> Json:
        return await self._keys.revoke(visit.actor, visit.name)

    async def refusals(self, visit: AdminRequest) -> Json:
        return {"refusals": await unhurried(self._history.refusals(), refusal_row)}

    async def usage(self, visit: AdminRequest) -> Json:
        return await self._usage.report(visit.query)

    async def usage_csv(self, visit: AdminRequest) -> TextAnswer:
        return TextAnswer(await self._usage.csv(visit.query), "text/csv; charset=utf-8")

    async def budgets(self, visit: AdminRequest) -> Json:
        return await self._usage.budgets()

    async def audit(self, visit: AdminRequest) -> Json:
        return {"entries": await self._audit.entries()}

    async def diagnosis(self, visit: AdminRequest) -> Json:
        return await self._diagnosis.report()

    async def _doctors_questions(self) -> dict[str, Json]:
        visit = AdminRequest("doctor")
        return {
            "overview": await self.overview(visit),
            "tenants": await self.tenants(visit),
            "queue": await self.queue(visit),
            "requests": await self.list_requests(visit),
            "policy": await self.policy(visit),
        }
