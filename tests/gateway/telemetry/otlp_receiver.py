"""A collector that keeps what it is sent: OTLP over gRPC and over HTTP, on loopback ports of its own choice.

It can be told to refuse, or to answer nothing until it is closed.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Manner(Enum):
    ACCEPT = auto()
    REFUSE = auto()  # for good: a sender must not try again
    BUSY = auto()  # a sender may try again
    HANG = auto()


@dataclass(eq=False)
class Receiver:
    """What has come, as it came. Read it from any thread."""

    grpc_endpoint: str = ""
    http_endpoint: str = ""  # a base: traces go to /v1/traces below it
    manner: Manner = Manner.ACCEPT
    requests: list[Message] = field(default_factory=list)  # those that were accepted
    metadata: list[dict[str, str]] = field(default_factory=list)  # the headers of each, names in lower case
    attempts: int = 0
    closing: threading.Event = field(default_factory=threading.Event)

    def endpoint(self, protocol: str) -> str:
        return self.grpc_endpoint if protocol == "grpc" else self.http_endpoint

    @property
    def spans(self) -> list[Span]:
        return [span for scope in self._scopes("resource_spans", "scope_spans") for span in scope.spans]

    @property
    def metrics(self) -> list[Metric]:
        return [metric for scope in self._scopes("resource_metrics", "scope_metrics") for metric in scope.metrics]

    @property
    def log_records(self) -> list[LogRecord]:
        return [record for scope in self._scopes("resource_logs", "scope_logs") for record in scope.log_records]

    def _scopes(self, resources: str, scopes: str) -> list[Any]:
        groups = [group for request in list(self.requests) for group in getattr(request, resources, ())]
        return [scope for group in groups for scope in getattr(group, scopes)]

    @property
    def resources(self) -> list[dict[str, Any]]:
        """Attributes of the resource of each request, spans and metrics alike."""
        return [
            plain(group.resource.attributes)
            for request in list(self.requests)
            for group in (getattr(request, "resource_spans", None) or getattr(request, "resource_metrics", ()))
        ]

    def take(self, request: Message, metadata: dict[str, str]) -> Manner:
        self.attempts += 1
        if self.manner is Manner.HANG:
            self.closing.wait()
        elif self.manner is Manner.ACCEPT:
            self.requests.append(request)
            self.metadata.append(metadata)
        return self.manner


@contextmanager
def otlp_receiver(manner: Manner = Manner.ACCEPT) -> Iterator[Receiver]:
    receiver = Receiver(manner=manner)
    with _grpc_server(receiver), _http_server(receiver):
        try:
            yield receiver
        finally:
            receiver.closing.set()


def plain(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


class _Traces(trace_grpc.TraceServiceServicer):
    answer: type[Message] = trace_pb.ExportTraceServiceResponse

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Message, context: grpc.ServicerContext) -> Message:  # noqa: N802
        _take_grpc(self._receiver, request, context)
        return self.answer()


class _Metrics(_Traces):
    answer = metrics_pb.ExportMetricsServiceResponse


class _Logs(_Traces):
    answer = logs_pb.ExportLogsServiceResponse


def _take_grpc(receiver: Receiver, request: Message, context: grpc.ServicerContext) -> None:
    match receiver.take(request, dict(context.invocation_metadata())):
        case Manner.REFUSE:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "refused")
        case Manner.BUSY | Manner.HANG:
            context.abort(grpc.StatusCode.UNAVAILABLE, "busy")


@contextmanager
def _grpc_server(receiver: Receiver) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(4))
    trace_grpc.add_TraceServiceServicer_to_server(_Traces(receiver), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(receiver), server)
    logs_grpc.add_LogsServiceServicer_to_server(_Logs(receiver), server)
    receiver.grpc_endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


MESSAGES = {
    "/v1/traces": trace_pb.ExportTraceServiceRequest,
    "/v1/metrics": metrics_pb.ExportMetricsServiceRequest,
    "/v1/logs": logs_pb.ExportLogsServiceRequest,
}
STATUSES = {Manner.ACCEPT: 200, Manner.REFUSE: 403, Manner.BUSY: 503, Manner.HANG: 503}


class _Handler(BaseHTTPRequestHandler):
    receiver: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = decompress(body)
        message = MESSAGES.get(self.path)
        status = 404
        if message is not None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = STATUSES[self.receiver.take(message.FromString(body), headers)]
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A sender that has gone away is none."""


@contextmanager
def _http_server(receiver: Receiver) -> Iterator[None]:
    server = _Server(("127.0.0.1", 0), type("_ReceiverHandler", (_Handler,), {"receiver": receiver}))
    receiver.http_endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
