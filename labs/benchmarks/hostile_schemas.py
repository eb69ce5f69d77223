"""The effect of hostile schemas on a neighbour's stream, live: `python -m labs.benchmarks.hostile_schemas`.

`sluice serve` with the embedded model, real HTTP. A tenant streams on two connections. Another asks on two more, again
as soon as it is answered, for answers to hostile schemas, eight of a kind in a window: some are refused, others are
compiled and then generate. A round of each kind has a quiet window, a hostile one, and one in which the other tenant
asks for as many tokens of free text as those answers had, so that what else the machine does falls on all three.
"""

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import count, cycle, pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from labs.benchmarks.fresh import check_nothing_was_cached
from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.load import post
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import make_keys

NEIGHBOUR, HOSTILE = "neighbour", "hostile"
STREAMS, TOKENS = 2, 300
HOSTILE_TOKENS = 48
PREPARED = 8  # requests of a window, which come again once all were sent: writing one takes the clients' time
MAX_LATENCY_RATIO = 1.1


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 0.5
    report = Report("hostile_schemas", options.quick)
    rows: list[dict[str, object]] = []
    worst = {"quiet": 0.0, "free text": 0.0}
    with TemporaryDirectory() as directory:
        state = Path(directory)
        keys = make_keys(state, (NEIGHBOUR, HOSTILE))
        settings = {"max_num_seqs": 8, "threads": 1, "metrics_on_tenant_port": True}
        with gateway_process(state, **settings) as server:
            _window(server.port, keys, options.seconds, None)
            for kind, schema in KINDS.items():
                gaps: dict[str, list[float]] = {"quiet": [], "free text": [], "hostile": []}
                statuses = Counter[int]()
                for _ in range(options.runs):
                    gaps["quiet"].append(_window(server.port, keys, options.seconds, None)[0])
                    p99, answered, tokens = _window(server.port, keys, options.seconds, schema)
                    gaps["hostile"].append(p99)
                    gaps["free text"].append(_window(server.port, keys, options.seconds, _free, tokens)[0])
                    statuses.update(answered)
                row: dict[str, object] = {"beside": kind, "tokens of an answer": tokens if statuses[200] else None}
                row |= {f"p99 ms, {when}": Spread.of([1e3 * gap for gap in found]) for when, found in gaps.items()}
                for when, most in worst.items():
                    pairs = zip(gaps["hostile"], gaps[when], strict=True)
                    row[f"of {when}"] = ratio = Spread.of([ours / theirs for ours, theirs in pairs])
                    worst[when] = max(most, ratio.median)
                rows.append(row | {"answers": dict(statuses)})
            check_nothing_was_cached(server.port)
    report.add_table("the neighbour's time between tokens", rows)
    for when, most in worst.items():
        report.at_most(
            f"p99 between tokens beside hostile schemas, times {when}; the worst kind", most, MAX_LATENCY_RATIO
        )
    return report.finish(options.results)


Schema = Callable[[int], dict[str, Any] | None]
"""Returns the schema of this number, or None for any text."""


def _free(_: int) -> None:
    return None


def _deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "const": f"leaf {n}"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def _branching(n: int, depth: int = 10, path: str = "k") -> dict[str, Any]:
    if not depth:
        return {"type": "string", "maxLength": 9 + n}
    ways = [(f"{path}{i}", _branching(n, depth - 1, f"{path}{i}")) for i in (0, 1)]
    return {"anyOf": [{"type": "object", "properties": {key: way}, "required": [key]} for key, way in ways]}


def _recursive(n: int) -> dict[str, Any]:
    node = {"type": "object", "properties": {f"next{n}": {"$ref": "#/$defs/node"}}, "required": [f"next{n}"]}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _matching(pattern: str) -> Schema:
    return lambda n: {"type": "string", "pattern": f"^{n % 10}{pattern}$"}


KINDS: dict[str, Schema] = {
    "60 levels deep": _deep,
    "3,000 optional fields": lambda n: {"properties": {f"f{n}_{i}": {"type": "string"} for i in range(3000)}},
    "recursive": _recursive,
    "anyOf of depth 10": _branching,
    "anyOf of depth 12": lambda n: _branching(n, 12),
    "enum of 20,000": lambda n: {"enum": [f"{n} value {i}" for i in range(20_000)]},
    "maxLength 100,000": lambda n: {"type": "string", "maxLength": 100_000 + n},
    "nested repetition": _matching("(x{1,100}){1,100}"),
    "pattern of 2^20 states": _matching("(a|b)*a(a|b){20}"),
    "100 look-arounds": lambda n: {
        "properties": {f"f{i}": {"pattern": f"^(?!(?:ab{n}|cd{i}|ef)$)[a-z]+$"} for i in range(100)}
    },
    "4 MB": lambda n: {"type": "object", "description": f"{n}" + "x" * (4 << 20)},
}


def _window(
    port: int, keys: dict[str, str], seconds: float, schema: Schema | None, most_tokens: int = HOSTILE_TOKENS
) -> tuple[float, Counter[int], int]:
    """Returns the neighbour's 99th percentile of seconds between events, how the other's requests were answered, and
    with how many tokens, as they were on average; as many as were asked for if none was.
    """
    ends, gaps, statuses, lengths = Event(), list[float](), Counter[int](), list[int]()
    asked = [_ask(keys[HOSTILE], most_tokens, schema(next(_numbers)), False) for _ in range(PREPARED)] if schema else []
    coming, watched = cycle(asked), _ask(keys[NEIGHBOUR], TOKENS, None, True)

    def neighbour() -> None:
        for _ in _until(ends):
            gaps.extend(later - sooner for sooner, later in pairwise(_stream(port, watched, ends)))

    def hostile() -> None:
        for _ in _until(ends):
            status, answer = _exchange(port, next(coming))
            statuses[status] += 1
            if status == HTTPStatus.OK:
                lengths.append(json.loads(answer)["usage"]["completion_tokens"])

    threads = [Thread(target=neighbour) for _ in range(STREAMS)]
    threads += [Thread(target=hostile) for _ in range(2)] if asked else []
    for thread in threads:
        thread.start()
    ends.wait(seconds)
    ends.set()
    for thread in threads:
        thread.join()
    return quantile(sorted(gaps), 0.99), statuses, round(mean(lengths)) if lengths else most_tokens


_numbers = count()


def _until(ends: Event) -> Iterator[None]:
    while not ends.is_set():
        yield


def _ask(key: str, tokens: int, schema: dict[str, Any] | None, is_streamed: bool) -> bytes:
    body = {
        "model": "embedded",
        "messages": [{"role": "user", "content": "Count from 3 to 90."}],
        "max_tokens": tokens,
        "stream": is_streamed,
    }
    if schema is None:
        return post("/v1/chat/completions", {**body, "ignore_eos": True}, key, connection="close")
    asked = {"type": "json_schema", "json_schema": {"name": "hostile", "schema": schema}}
    return post("/v1/chat/completions", {**body, "response_format": asked}, key, connection="close")


def _stream(port: int, request: bytes, ends: Event) -> list[float]:
    """Returns when the events of an answer came until its end or that of the window."""
    times = list[float]()
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(request)
        while part := link.recv(1 << 16):
            if b"data:" in part:
                times.append(time.perf_counter())
            if ends.is_set() and times:
                break
    return times


def _exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Returns the status of an answer, and its body."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(request)
        answer = b"".join(iter(lambda: link.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


if __name__ == "__main__":
    sys.exit(main())
