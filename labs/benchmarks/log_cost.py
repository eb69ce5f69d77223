"""The cost of a request's log line to the event loop: `python -m labs.benchmarks.log_cost`.

The line is made, formatted and handed to the writer's thread, which writes it to a pipe that is read.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from admission.outcome import Outcome
from admission.promise import Promise
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from gateway.settings.settings import Settings
from gateway.telemetry.logs.logs import logging_to, num_lines_dropped
from gateway.telemetry.logs.request_log import RequestLog
from gateway.telemetry.request_record import EngineRecord, RequestRecord, SequenceTimeline, trace_context
from labs.benchmarks.report import Report, Spread, scenario_parser

LINES = 2000  # at once; what is pending stays below what the writer holds
BLOCK_BYTES = 16_384


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=15).parse_args(arguments)
    report = Report("log_cost", options.quick)
    with _read_pipe() as fd, logging_to(fd, Settings(log_format="json")):
        costs = [_line_us() for _ in range(1 if options.quick else options.runs)]
        report.notes = [f"{num_lines_dropped()} lines dropped"]
    report.add_table("one line", [{"us of the caller": Spread.of(costs)}])
    report.at_most("CPU time of the caller for a line, us", Spread.of(costs).median, 10.0)
    return report.finish(options.results)


def _line_us() -> float:
    log, record = RequestLog(BLOCK_BYTES), _record()
    log(record)
    before = time.thread_time()
    for _ in range(LINES):
        log(record)
    cost = (time.thread_time() - before) / LINES * 1e6
    time.sleep(0.2)  # for the writer's thread
    return cost


def _record() -> RequestRecord:
    """The record of a served request."""
    sequence = Sequence(PromptRequest("chatcmpl-1-0", "acme", [7] * 200, SamplingParams(), 100, 0, frozenset()))
    sequence.output += [8] * 100
    timeline = SequenceTimeline(sequence, Promise("acme"), 100.004, admitted=100.01, first_token=100.03, ended=100.9)
    return RequestRecord(
        "req_6ec9de4ba31910add664c99886e0e036",
        "POST",
        "/v1/chat/completions",
        trace_context(None, None),
        100.0,
        time.time_ns(),
        tenant="acme",
        key="k1",
        model="embedded",
        operation="chat",
        service_class="standard",
        response_id="chatcmpl-e71eaeabbc172598fa7977abb8fec332",
        ended=100.91,
        engine=EngineRecord(timelines=[timeline]),
        outcome=Outcome.COMPLETED,
        status=200,
    )


@contextmanager
def _read_pipe() -> Iterator[int]:
    """The writing end of a pipe that is read as fast as it fills."""
    reading, writing = os.pipe()

    def read() -> None:
        while os.read(reading, 1 << 20):
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield writing
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)


if __name__ == "__main__":
    sys.exit(main())
