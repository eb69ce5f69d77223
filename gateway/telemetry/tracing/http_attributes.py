"""The root span's name and attributes common to gateway and router: nothing of an engine."""

import re

from gateway.errors import RouteNotFound
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing.span_tree import Attributes

_IDS = re.compile(r"^(/v1/models)/[\s\S]+|(?<=^/v1/)(responses|conversations|files|batches)/[^/]+|(?<=/items)/[^/]+")


def route_of(record: RequestRecord) -> str:
    """Return the route of its path, `{id}` in place of ids: clients cannot make new names of spans."""
    if isinstance(record.error, RouteNotFound):
        return "{unknown}"
    return _IDS.sub(lambda found: f"{found[1] or found[2] or ''}/{{id}}", record.path)


def of_http(record: RequestRecord) -> Attributes:
    """The attributes of client, route and outcome."""
    return {
        "http.request.method": record.method,
        "http.route": route_of(record),
        "url.path": record.path,
        "http.response.status_code": record.status or None,
        "http.request.resend_count": record.num_retries or None,
        "sluice.request.id": record.request_id,
        "sluice.tenant.id": record.tenant,
        "sluice.key.id": record.key,
        "sluice.outcome": None if record.outcome is None else record.outcome.value,
    }
