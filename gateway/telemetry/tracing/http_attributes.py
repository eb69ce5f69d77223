"""The root span's attributes common to gateway and router: nothing of an engine."""

from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing.span_tree import Attributes


def of_http(record: RequestRecord, route: str) -> Attributes:
    """The attributes of client, route and outcome."""
    return {
        "http.request.method": record.method,
        "http.route": route,
        "url.path": record.path,
        "http.response.status_code": record.status or None,
        "http.request.resend_count": record.num_retries or None,
        "sluice.request.id": record.request_id,
        "sluice.tenant.id": record.tenant,
        "sluice.key.id": record.key,
        "sluice.outcome": None if record.outcome is None else record.outcome.value,
    }
