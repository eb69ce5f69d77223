"""Follows every request from its first byte to its last, and tells whoever keeps accounts of them."""

import logging
import time
from collections.abc import Callable

from starlette.types import Scope

from admission.outcome import Outcome
from gateway.http.responses import ResponseWriter
from gateway.telemetry.request_record import RequestRecord, current, trace_context

log = logging.getLogger(__name__)

Listener = Callable[[RequestRecord], object]


class Telemetry:
    """`clock` is the engine's. Listeners are told of each request once, when it has ended."""

    def __init__(self, clock: Callable[[], float], unix_ns: Callable[[], int] = time.time_ns) -> None:
        self.clock = clock
        self.live: set[RequestRecord] = set()
        self.on_end: list[Listener] = []
        self._unix_ns = unix_ns

    def begin(self, scope: Scope, response: ResponseWriter) -> RequestRecord:
        retries = response.request_header(b"x-stainless-retry-count") or b""
        record = RequestRecord(
            response.request_id.decode(),
            scope["method"],
            scope["path"],
            trace_context(response.request_header(b"traceparent"), response.request_header(b"tracestate")),
            self.clock(),
            self._unix_ns(),
            int(retries) if len(retries) < 4 and retries.isdigit() else 0,
        )
        self.live.add(record)
        current.set(record)
        return record

    def ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """Nothing that a listener does wrong reaches the client."""
        self.live.discard(record)
        record.outcome, record.ended = outcome, self.clock()
        for tell in self.on_end:
            try:
                tell(record)
            except Exception:
                log.exception("the end of a request was not recorded")
