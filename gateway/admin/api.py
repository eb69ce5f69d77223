"""The admin API: its paths and their handlers.

Moments are in Unix seconds, durations in seconds, and null means unknown. Lists are capped; `truncated` counts the rows
left out. docs/admin.md describes each answer.
"""

import time
from datetime import UTC, datetime

import orjson
from starlette.routing import Route

from gateway.admin.actions import Actions
from gateway.admin.adapters import Adapters, NewAdapter
from gateway.admin.admins import Role
from gateway.admin.app import LOADS
from gateway.admin.audit_log import AuditLog
from gateway.admin.bill import BillReader
from gateway.admin.cut_requests import CutRequest, settle_cut
from gateway.admin.diagnosis import Diagnosis
from gateway.admin.endpoint import AdminRequest, Blob, Json, admin_route, who_asks
from gateway.admin.explanation import Explanations
from gateway.admin.history import History
from gateway.admin.keys import KeyEdit, Keys, NewKey, Rotation
from gateway.admin.kv_map import kv_map
from gateway.admin.live_requests import LiveRequests
from gateway.admin.overview import Process, QueueView, overview
from gateway.admin.policy import PASTED_BODY_BYTES, PastedPolicy, PolicyCheck, policy_report
from gateway.admin.policy_editor import PolicyEditor, SourceEdit, Undo, WhatIfEdit
from gateway.admin.request_search import RequestLogReader
from gateway.admin.rows import Reasons, refusal_row
from gateway.admin.tenants import Tenants
from gateway.admin.usage import UsageReader
from gateway.admin.what_if import WhatIfs
from gateway.api.service import Service
from gateway.background import map_in_slices
from gateway.doctor.snapshot import HISTORY_SECONDS, METRICS_INTERVAL_SECONDS
from gateway.errors import BadRequest, RequestNotFound
from gateway.http.json_body import JsonBody, parse_body
from gateway.quoting import quoted
from gateway.replica.sglang import loads
from gateway.tenants.key_source import KeySource

PREFIX = "/admin/v1"


def _event(request: AdminRequest) -> int:
    since = request.query.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) <= 18):
        raise BadRequest(f"since must be the `next` of an earlier state, got {quoted(since, 40)}.", "since")
    return int(since)


def _last(request: AdminRequest) -> float | None:
    """Parse the time to look back; None if the present is asked for. Raises `BadRequest`."""
    text = request.query.get("last")
    if text is None:
        return None
    if not (
        text.isascii()
        and text.isdigit()
        and len(text) <= 3
        and METRICS_INTERVAL_SECONDS <= int(text) <= HISTORY_SECONDS
    ):
        raise BadRequest(
            f"last must be seconds, {METRICS_INTERVAL_SECONDS:.0f} to {HISTORY_SECONDS:.0f}, got {quoted(text, 40)}.",
            "last",
        )
    return float(text)


class Api:
    """Handles requests to the admin API by reading the gateway as it is at that moment; `actions` change it."""

    def __init__(
        self,
        process: Process,
        service: Service,
        history: History,
        audit: AuditLog,
        keys: KeySource,
        what_ifs: WhatIfs,
        request_log: RequestLogReader,
        editor: PolicyEditor,
        bill: BillReader,
        adapters: Adapters,
        explanations: Explanations,
    ) -> None:
        self._process = process
        self._service = service
        self._history = history
        self._audit = audit
        scheduler = service.core.scheduler
        reasons = Reasons(scheduler)
        self.requests = LiveRequests(service.telemetry, history, reasons)
        self._queue = QueueView(scheduler, reasons)
        self._tenants = Tenants(service, history, self.requests)
        self._keys = Keys(keys, service.policies, audit)
        self._adapters = adapters
        self._usage = UsageReader(service, keys)
        self._bill = bill
        self._what_ifs = what_ifs
        self._request_log = request_log
        self._editor = editor
        self._explanations = explanations
        self._policy_check = PolicyCheck()
        self._diagnosis = Diagnosis(self._doctors_questions, service.metrics.prometheus_text, service.telemetry.clock)
        self.watch = self._diagnosis.watch

    def routes(self, actions: Actions) -> list[Route]:
        """The routes of the API; the first match answers a request."""
        return [
            admin_route("GET", LOADS, self.loads),
            admin_route("GET", f"{PREFIX}/me", who_asks),
            admin_route("GET", f"{PREFIX}/state", self.state),
            admin_route("GET", f"{PREFIX}/overview", self.overview),
            admin_route("GET", f"{PREFIX}/tenants", self.tenants),
            admin_route("GET", f"{PREFIX}/tenants/{{name:name}}", self.tenant),
            admin_route("GET", f"{PREFIX}/requests", self.list_requests),
            admin_route(
                "POST",
                f"{PREFIX}/requests/{{name:name}}/cancel",
                lambda request: actions.cancel(request.actor, request.name),
                role=Role.OPERATOR,
            ),
            admin_route("GET", f"{PREFIX}/requests/{{name:name}}/explanation", self.explain),
            admin_route("GET", f"{PREFIX}/requests/{{name:name}}", self.show_request),
            admin_route("GET", f"{PREFIX}/request-log", self.request_log),
            admin_route("POST", f"{PREFIX}/request-log/{{name:name}}/texts", self.texts, role=Role.OPERATOR),
            admin_route("GET", f"{PREFIX}/queue", self.queue),
            admin_route("GET", f"{PREFIX}/kv", self.kv),
            admin_route("GET", f"{PREFIX}/policy", self.policy),
            admin_route("GET", f"{PREFIX}/policy/text", self.policy_text),
            admin_route("GET", f"{PREFIX}/policy/source", self.policy_source, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/policy/source", self.edit_policy, PASTED_BODY_BYTES, Role.ADMIN),
            admin_route("POST", f"{PREFIX}/policy/undo", self.undo_policy_edit, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/policy/check", self.check_policy, PASTED_BODY_BYTES),
            admin_route("POST", f"{PREFIX}/policy/what-if", self.what_if, PASTED_BODY_BYTES),
            admin_route(
                "POST",
                f"{PREFIX}/policy/reload",
                lambda request: actions.reload(request.actor),
                role=Role.OPERATOR,
            ),
            admin_route("GET", f"{PREFIX}/keys", self.keys),
            admin_route("POST", f"{PREFIX}/keys", self.create_key, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/keys/{{name:name}}/edit", self.edit_key, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/keys/{{name:name}}/what-if", self.what_if_of_key, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/keys/{{name:name}}/rotate", self.rotate_key, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/keys/{{name:name}}/revoke", self.revoke_key, role=Role.ADMIN),
            admin_route("GET", f"{PREFIX}/adapters", self.list_adapters),
            admin_route("POST", f"{PREFIX}/adapters", self.load_adapter, role=Role.ADMIN),
            admin_route("POST", f"{PREFIX}/adapters/{{name:name}}/unload", self.unload_adapter, role=Role.ADMIN),
            admin_route("GET", f"{PREFIX}/refusals", self.refusals),
            admin_route("GET", f"{PREFIX}/usage", self.usage),
            admin_route("GET", f"{PREFIX}/usage.csv", self.usage_csv),
            admin_route("GET", f"{PREFIX}/bill", self.bill),
            admin_route("GET", f"{PREFIX}/bill.csv", self.bill_csv),
            admin_route("GET", f"{PREFIX}/budgets", self.budgets),
            admin_route("GET", f"{PREFIX}/audit", self.audit),
            admin_route("GET", f"{PREFIX}/diagnosis", self.diagnosis),
            admin_route("POST", f"{PREFIX}/cut-requests", self.settle_cut, role=Role.OPERATOR),
            admin_route("POST", f"{PREFIX}/drain", lambda request: actions.drain(request.actor), role=Role.OPERATOR),
        ]

    async def state(self, request: AdminRequest) -> Blob:
        state = self._service.metrics.replica.state(self._process.is_draining(), _event(request))
        return Blob(orjson.dumps(state), "application/json")

    async def loads(self, request: AdminRequest) -> Json:
        return loads(self._service.metrics.replica.totals(), datetime.now(UTC))

    async def settle_cut(self, request: AdminRequest) -> Json:
        return await settle_cut(self._service.quotas.store, parse_body(CutRequest, JsonBody.of(request.body)))

    async def overview(self, request: AdminRequest) -> Json:
        return overview(self._process, self._service, self._history, time.time())

    async def tenants(self, request: AdminRequest) -> Json:
        return await self._tenants.listed(request.words)

    async def tenant(self, request: AdminRequest) -> Json:
        return await self._tenants.shown(request.name)

    async def list_requests(self, request: AdminRequest) -> Json:
        return await self.requests.listed()

    async def show_request(self, request: AdminRequest) -> Json:
        try:
            return self.requests.shown(request.name)
        except RequestNotFound:
            return await self._request_log.shown(request.name)

    async def request_log(self, request: AdminRequest) -> Json:
        return await self._request_log.listed(request.query)

    async def explain(self, request: AdminRequest) -> Json:
        return await self._explanations.of(request.name)

    async def texts(self, request: AdminRequest) -> Json:
        await self._audit.record(request.actor, "requests.read_texts", f"{request.name:.200}", "done")
        return await self._request_log.texts(request.name)

    async def queue(self, request: AdminRequest) -> Json:
        now = self._service.telemetry.clock()
        return await self._queue.listed(self.requests.records(), now)

    async def kv(self, request: AdminRequest) -> Json:
        return await kv_map(self._service.core.scheduler, self._service.kv_shape.block_bytes)

    async def policy(self, request: AdminRequest) -> Json:
        return {**await policy_report(self._service.policies, request.words), "edits": self._editor.made()}

    async def policy_text(self, request: AdminRequest) -> Json:
        return await self._policy_check.text(self._service.policies.current)

    async def policy_source(self, request: AdminRequest) -> Json:
        return await self._editor.source(request.query.get("tenant") or None)

    async def edit_policy(self, request: AdminRequest) -> Json:
        return await self._editor.edit(request.actor, parse_body(SourceEdit, JsonBody.of(request.body)))

    async def undo_policy_edit(self, request: AdminRequest) -> Json:
        return await self._editor.undo(request.actor, parse_body(Undo, JsonBody.of(request.body)).edit)

    async def check_policy(self, request: AdminRequest) -> Json:
        pasted = parse_body(PastedPolicy, JsonBody.of(request.body))
        return await self._policy_check.of(pasted, self._service.policies.current, self._service.policies.checks)

    async def what_if(self, request: AdminRequest) -> Json:
        asked = parse_body(WhatIfEdit, JsonBody.of(request.body))
        return await self._what_ifs.of(await self._editor.edited(asked))

    async def keys(self, request: AdminRequest) -> Json:
        return await self._keys.listed(request.words)

    async def create_key(self, request: AdminRequest) -> Json:
        return await self._keys.create(request.actor, parse_body(NewKey, JsonBody.of(request.body)))

    async def edit_key(self, request: AdminRequest) -> Json:
        edit = parse_body(KeyEdit, JsonBody.of(request.body))
        return await self._keys.edit(request.actor, request.name, edit)

    async def what_if_of_key(self, request: AdminRequest) -> Json:
        base, edited = await self._keys.policies(request.name, parse_body(KeyEdit, JsonBody.of(request.body)))
        return await self._what_ifs.of(edited, base)

    async def rotate_key(self, request: AdminRequest) -> Json:
        return await self._keys.rotate(
            request.actor, request.name, parse_body(Rotation, JsonBody.of(request.body or b"{}"))
        )

    async def revoke_key(self, request: AdminRequest) -> Json:
        return await self._keys.revoke(request.actor, request.name)

    async def list_adapters(self, request: AdminRequest) -> Json:
        return await self._adapters.listed()

    async def load_adapter(self, request: AdminRequest) -> Json:
        return await self._adapters.load(request.actor, parse_body(NewAdapter, JsonBody.of(request.body)))

    async def unload_adapter(self, request: AdminRequest) -> Json:
        return await self._adapters.unload(request.actor, request.name)

    async def refusals(self, request: AdminRequest) -> Json:
        return {"refusals": await map_in_slices(self._history.refusals(), refusal_row)}

    async def usage(self, request: AdminRequest) -> Json:
        return await self._usage.report(request.query, request.words, self._bill.begun(request.query))

    async def usage_csv(self, request: AdminRequest) -> Blob:
        return Blob((await self._usage.csv(request.query)).encode(), "text/csv; charset=utf-8")

    async def bill(self, request: AdminRequest) -> Json:
        return await self._bill.bill(request.query)

    async def bill_csv(self, request: AdminRequest) -> Blob:
        return Blob((await self._bill.csv(request.query)).encode(), "text/csv; charset=utf-8")

    async def budgets(self, request: AdminRequest) -> Json:
        return await self._usage.budgets(request.words)

    async def audit(self, request: AdminRequest) -> Json:
        return {"entries": await self._audit.entries()}

    async def diagnosis(self, request: AdminRequest) -> Json:
        seconds = _last(request)
        return await (self._diagnosis.report() if seconds is None else self._diagnosis.history(seconds))

    async def _doctors_questions(self) -> dict[str, Json]:
        request = AdminRequest("doctor")
        return {
            "overview": await self.overview(request),
            "tenants": await self.tenants(request),
            "queue": await self.queue(request),
            "requests": await self.list_requests(request),
            "policy": await self.policy(request),
        }
