"""Follows every request from its first byte to its last, and notifies listeners when it has ended."""

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
    """Keeps the records of live requests and calls listeners with each one that has ended. `clock` is the engine's."""

    def __init__(self, clock: Callable[[], float], unix_ns: Callable[[], int] = time.time_ns) -> None:
        self.clock = clock
        self.live: set[RequestRecord] = set()
        self.on_end: list[Listener] = []
        self._unix_ns = unix_ns

    def begin(self, scope: Scope, response: ResponseWriter) -> RequestRecord:
        """Make the record of a request, which the running task and those that it starts find in `current`."""
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
        """Note the end of a request and call the listeners, whose failures are logged and do not reach the client."""
        self.live.discard(record)
        record.outcome, record.ended = outcome, self.clock()
        for listener in self.on_end:
            try:
                listener(record)
            except Exception:
                log.exception("the end of a request was not recorded")
