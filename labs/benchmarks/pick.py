"""The cost of a pick: `sluice pick` asked as a gateway asks, beside an empty picker of grpc.aio that decides nothing.

Each picker runs on one core, and on the other the load, which is Python as well and about as slow: so picks a second of
a core are counted by the processor time that the picker took. A pick is the head of a request and its body of a chat,
and the answer to both; an exchange has the head and the body of an answer besides.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import grpc
import orjson

from backend.bound_process import bound
from fleet.ext_proc.messages import ProcessingRequest
from fleet.ext_proc.server import EXT_PROC
from labs.benchmarks import machine
from labs.benchmarks.fresh import MARK, Fresh
from labs.benchmarks.machine import cpu_seconds, on_core
from labs.benchmarks.processes import ROOT, Worker, WorkerFailed
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser

KEY, ADMIN_KEY = "sk-benchmark", "correct-horse-battery-staple"
PATH = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence. " * 40},
    {"role": "user", "content": f"{MARK}: tell me a story of 3 sentences."},
]
CONCURRENT = 16
PICKS_PER_SECOND = 500.0  # a second, as they come
Figures = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    picker_core, load_core = machine.two_cores()
    report = Report("pick", options.quick)
    figures: Figures = defaultdict(list)
    with ExitStack() as running:
        servers = [
            running.enter_context(Worker.module("labs.benchmarks.bare_server", core=load_core)) for _ in range(2)
        ]
        floor = running.enter_context(Worker.module("labs.benchmarks.bare_picker", core=picker_core))
        pid, port = running.enter_context(_picker([server.ready["port"] for server in servers], picker_core))
        os.sched_setaffinity(0, {load_core})
        pickers = {"empty": (floor.pid, floor.ready["port"]), "sluice pick": (pid, port)}
        for run in range(runs):
            asyncio.run(_measure(pickers, seconds, Random(run), figures))
    _tell(report, figures)
    return report.finish(options.results)


async def _measure(pickers: dict[str, tuple[int, int]], seconds: float, dice: Random, figures: Figures) -> None:
    for name, (pid, port) in pickers.items():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            process = channel.stream_stream(f"/{EXT_PROC}/Process")
            for what, answered in (("picks", ()), ("exchanges", ANSWERED)):
                began = cpu_seconds(pid)
                count, took = await _closed_loop(process, answered, seconds)
                figures[f"{name} {what} a core"].append(count / max(cpu_seconds(pid) - began, 1e-9))
                figures[f"{name} {what}/s"].append(count / took)
            latencies = sorted(await _open_loop(process, seconds, dice))
            figures[f"{name} p50"].append(quantile(latencies, 0.5) * 1e3)
            figures[f"{name} p99"].append(quantile(latencies, 0.99) * 1e3)


def _asked() -> tuple[bytes, Fresh]:
    """The head of a request, and bodies, none as another."""
    body = orjson.dumps({"model": "embedded", "messages": MESSAGES})
    pseudo = [(":method", "POST"), (":path", PATH), (":authority", "models.internal"), (":scheme", "http")]
    headers = [
        *pseudo,
        ("authorization", f"Bearer {KEY}"),
        ("content-type", "application/json"),
        ("x-request-id", "0" * 32),
        ("user-agent", "OpenAI/Python 1.70.0"),
        ("accept", "application/json"),
        ("x-forwarded-for", "10.0.0.9"),
        ("content-length", str(len(body))),
        ("x-forwarded-proto", "http"),
        ("x-stainless-lang", "python"),
    ]
    head = _told(request_headers={"headers": _header_map(headers)})
    return head, Fresh(_told(request_body={"body": body, "end_of_stream": True}))


def _answered() -> tuple[bytes, bytes]:
    headers = [(":status", "200"), ("content-type", "application/json"), ("x-request-id", "0" * 32)]
    return (
        _told(response_headers={"headers": _header_map(headers)}),
        _told(response_body={"body": bytes(800), "end_of_stream": True}),
    )


def _header_map(headers: list[tuple[str, str]]) -> dict[str, Any]:
    return {"headers": [{"key": name, "raw_value": value.encode()} for name, value in headers]}


def _told(**message: Any) -> bytes:
    encoded: bytes = ProcessingRequest(**message).SerializeToString()
    return encoded


HEAD, BODIES = _asked()
ANSWERED = _answered()


async def _exchange(process: Any, answered: Sequence[bytes]) -> float:
    """Return the seconds until the pick. As many answers as messages have to come."""
    call, began = process(), perf_counter()
    for message in (HEAD, next(BODIES)):
        await call.write(message)
    assert await call.read() is not grpc.aio.EOF
    picked = perf_counter() - began
    assert await call.read() is not grpc.aio.EOF
    for message in answered:
        await call.write(message)
        assert await call.read() is not grpc.aio.EOF
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return picked


async def _closed_loop(process: Any, answered: Sequence[bytes], seconds: float) -> tuple[int, float]:
    began, count = perf_counter(), 0

    async def client() -> None:
        nonlocal count
        while perf_counter() - began < seconds:
            await _exchange(process, answered)
            count += 1

    await asyncio.gather(*(client() for _ in range(CONCURRENT)))
    return count, perf_counter() - began


async def _open_loop(process: Any, seconds: float, dice: Random) -> list[float]:
    """Return how long each pick took from the moment at which it was due."""
    began, due, latencies = perf_counter(), 0.0, list[float]()

    async def one(at: float) -> None:
        late = perf_counter() - at
        latencies.append(late + await _exchange(process, ()))

    async with asyncio.TaskGroup() as group:
        while (due := due + dice.expovariate(PICKS_PER_SECOND)) < seconds:
            await asyncio.sleep(began + due - perf_counter())
            group.create_task(one(began + due))
    return latencies


@contextmanager
def _picker(ports: list[int], core: int) -> Iterator[tuple[int, int]]:
    """Run one on a core; yield its process and its port once it has heard from the replicas."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "replicas.yaml"
        rows = "".join(f"- {{url: 'http://127.0.0.1:{port}', admin: 'http://127.0.0.1:{port}'}}\n" for port in ports)
        file.write_text(f"replicas:\n{rows}")
        flags = ["--replicas", str(file), "--port", "0", "--admin-port", "off", "--state-dir", folder]
        environment = {**os.environ, "SLUICE_DEMO_KEY": KEY, "SLUICE_ADMIN_KEY": ADMIN_KEY}
        with on_core(core):
            process = subprocess.Popen(
                **bound([sys.executable, "-m", "sluice", "pick", *flags, "--log-level", "warning"]),
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline())
            if found is None:
                raise WorkerFailed(f"sluice pick ended with status {process.wait()}")
            asyncio.run(_ready(int(found[1])))
            yield process.pid, int(found[1])
        finally:
            process.terminate()
            process.communicate()


async def _ready(port: int) -> None:
    """Ask until a pick is made."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        process = channel.stream_stream(f"/{EXT_PROC}/Process")
        while True:
            call = process()
            for message in (HEAD, next(BODIES)):
                await call.write(message)
            first = await call.read()
            await call.done_writing()
            if b"x-gateway-destination-endpoint" in first:
                return
            await asyncio.sleep(0.05)


def _tell(report: Report, figures: Figures) -> None:
    columns = ("picks a core", "exchanges a core", "picks/s", "exchanges/s", "p50", "p99")
    heads = {"p50": f"p50 ms at {PICKS_PER_SECOND:g}/s", "p99": f"p99 ms at {PICKS_PER_SECOND:g}/s"}
    rows: list[dict[str, object]] = [
        {"picker": name, **{heads.get(column, column): Spread.of(figures[f"{name} {column}"]) for column in columns}}
        for name in ("empty", "sluice pick")
    ]
    report.add_table(f"a core is a second of its processor time; {CONCURRENT} at a time, median (extremes)", rows)
    report.at_least("picks a second of a core", median(figures["sluice pick picks a core"]), 1000)
    report.at_most(f"p99 at {PICKS_PER_SECOND:g}/s, ms", median(figures["sluice pick p99"]), 10)


if __name__ == "__main__":
    sys.exit(main())
