"""The cost of a request's log line, and of its row in the log of requests: `python -m labs.benchmarks.log_cost`.

The line is made, formatted and handed to the writer's thread, which writes it to a pipe that is read. The row is what
two gateways on one core differ in, one with `--request-log-bytes 0`, which take turns: CPU time of the whole process,
SQLite's thread included, for a request of 32 steps over a simulated device, which takes none.
"""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from admission.outcome import Outcome
from admission.promise import Promise
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from gateway.settings.settings import Settings
from gateway.telemetry.logs.logs import logging_to, num_lines_dropped
from gateway.telemetry.logs.request_log import RequestLog
from gateway.telemetry.request_record import EngineRecord, RequestRecord, SequenceTimeline, trace_context
from labs.benchmarks import machine
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.telemetry_cost import Figures, measure

LINES = 2000  # at once; what is pending stays below what the writer holds
BLOCK_BYTES = 16_384
STEPS = 32  # tokens of an answer


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=15).parse_args(arguments)
    report = Report("log_cost", options.quick)
    with _read_pipe() as fd, logging_to(fd, Settings(log_format="json")):
        costs = [_line_us() for _ in range(1 if options.quick else options.runs)]
        report.notes = [f"{num_lines_dropped()} lines dropped"]
    report.add_table("one line", [{"us of the caller": Spread.of(costs)}])
    report.at_most("CPU time of the caller for a line, us", Spread.of(costs).median, 10.0)
    figures = _rows(1 if options.quick else options.runs, 0.3 if options.quick else 1.0)
    added = [100 * (ours / without - 1) for ours, without in zip(*figures.values(), strict=True)]
    table = [{"log of requests": name, "process us/request": Spread.of(costs)} for name, costs in figures.items()]
    report.add_table(f"one row, of a request of {STEPS} tokens", [table[0] | {"added %": Spread.of(added)}, table[1]])
    report.at_most("CPU of the process that the log of requests adds, %", Spread.of(added).median, 3.0)
    return report.finish(options.results)


def _rows(runs: int, seconds: float) -> dict[str, list[float]]:
    """The CPU microseconds of a request in each run, with the log of requests and without."""
    server_core, load_core = machine.two_cores()
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        gateways = {
            name: running.enter_context(
                Worker.module(
                    "labs.benchmarks.gateway_server",
                    "--set=admin_port=0",
                    f"--set=request_log_bytes={size}",
                    core=server_core,
                )
            )
            for name, size in {"on": "256MiB", "off": "0"}.items()
        }
        os.sched_setaffinity(0, {load_core})
        for run in range(runs):
            for name in sorted(gateways, reverse=run % 2 == 0):
                measure(name, gateways[name], seconds, figures, STEPS)
    return {name: figures[f"{name} process us"] for name in gateways}


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
    timeline = SequenceTimeline(sequence, Promise(), 100.004, admitted=100.01, first_token=100.03, ended=100.9)
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
