"""The attributes of a request's root span that any server has, be it a gateway or a router: nothing of an engine."""

from gateway.telemetry import semconv
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing.span_tree import Attributes


def of_http(record: RequestRecord, route: str) -> Attributes:
    """Returns who asked for what, and how it ended."""
    return {
        semconv.HTTP_REQUEST_METHOD: record.method,
        semconv.HTTP_ROUTE: route,
        semconv.URL_PATH: record.path,
        semconv.HTTP_RESPONSE_STATUS_CODE: record.status or None,
        semconv.HTTP_REQUEST_RESEND_COUNT: record.num_retries or None,
        semconv.REQUEST_ID: record.request_id,
        semconv.TENANT_ID: record.tenant,
        semconv.KEY_ID: record.key,
        semconv.OUTCOME: None if record.outcome is None else record.outcome.value,
    }
