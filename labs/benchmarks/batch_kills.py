"""A batch through kills of its gateway: python -m labs.benchmarks.batch_kills [--lines 10000] [--kills 10]

A gateway with the embedded model on the CPU is given a batch of short completions, of a tenant with a budget of tokens.
It is sent SIGKILL several times before the end, each time when a random number of lines is done, and another one takes
the state directory over. In the end each `custom_id` has to be in the output once, in the order of the input, and what
the budget lost and the usage ledger tells has to be the sum of `usage` in it.
"""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import orjson

from backend.bound_process import bound
from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from labs.benchmarks.gateway_process import GatewayProcess, gateway_process
from labs.benchmarks.processes import ROOT
from labs.benchmarks.report import Report, scenario_parser

POLICY = "tenants: {night: {limits: {tokens: 1B/month}}}\n"
LEASE_SECONDS = 3.0
ENDED = ("completed", "failed", "expired", "cancelled")


class _Client:
    """The tenant's client of one life of the gateway."""

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}/v1", headers=headers, timeout=600)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._http.request(method, path, **options).raise_for_status()

    def start(self, num_lines: int) -> str:
        body = {"model": "embedded", "prompt": "One, two, three,", "temperature": 0, "ignore_eos": True}
        asked: Any = {"method": "POST", "url": "/v1/completions"}
        bodies = [body | {"max_tokens": 4 + number % 13} for number in range(num_lines)]
        lines = [orjson.dumps(asked | {"custom_id": str(n), "body": body}) for n, body in enumerate(bodies)]
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", b"\n".join(lines))}}
        file = self.ask("POST", "/files", **form).json()["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        name: str = self.ask("POST", "/batches", json=wanted).json()["id"]
        return name

    def wait(self, batch: str, until: Callable[[Any], bool]) -> Any:
        while not until(found := self.ask("GET", f"/batches/{batch}").json()):
            time.sleep(0.1)
        return found

    def left(self) -> int:
        """What is left of the budget."""
        limits = self.ask("GET", "/limits").json()["data"]
        return next(int(one["remaining"]) for one in limits if one["resource"] == "tokens")


def _booked(state: Path) -> int:
    """Tokens of input and output that the usage ledger has of the tenant."""
    command = [sys.executable, "-m", "sluice", "usage", "--csv", "--tenant", "night", "--state-dir", str(state)]
    done = subprocess.run(**bound(command), cwd=ROOT, check=True, capture_output=True, text=True)
    return sum(int(row["input_tokens"]) + int(row["output_tokens"]) for row in csv.DictReader(done.stdout.splitlines()))


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options = parser.parse_args(arguments)
    num_lines, kills = (60, 1) if options.quick else (options.lines, options.kills)
    random = Random(options.seed)
    moments = sorted(random.randrange(num_lines) for _ in range(kills))
    report = Report("batch_kills", options.quick)
    with TemporaryDirectory() as folder:
        state, policy = Path(folder) / "state", Path(folder) / "policy.yaml"
        policy.write_text(POLICY)
        store = KeyStore(state)
        key, record = new_key("night", store.pepper())
        store.add(record)
        settings = {"policy": policy, "quota_lease": LEASE_SECONDS, "threads": 1}
        batch, before, began = "", 0, time.monotonic()
        for done in [*moments, None]:
            with gateway_process(state, **settings) as gateway:
                client = _Client(gateway, key)
                before = before or client.left()
                batch = batch or client.start(num_lines)
                if done is not None:
                    client.wait(batch, lambda found, done=done: found["request_counts"]["completed"] >= done)
                    os.kill(gateway.pid, signal.SIGKILL)
                    continue
                found = client.wait(batch, lambda found: found["status"] in ENDED)
                output = client.ask("GET", f"/files/{found['output_file_id']}/content").content
                spent, booked = before - client.left(), _booked(state)
    results = [orjson.loads(line) for line in output.splitlines()]
    usages = [one["response"]["body"]["usage"]["total_tokens"] for one in results]
    ids = [one["custom_id"] for one in results]
    report.add_table(
        "one batch",
        [
            {
                "lines": num_lines,
                "kills after": ", ".join(map(str, moments)),
                "status": found["status"],
                "distinct": len(set(ids)),
                "tokens in the output": sum(usages),
                "tokens in the batch": found["usage"]["total_tokens"],
                "tokens of the budget": spent,
                "tokens in the ledger": booked,
                "seconds": time.monotonic() - began,
            }
        ],
    )
    report.at_most("lines that are missing, twice or out of order", sum(a != str(b) for b, a in enumerate(ids)), 0)
    report.at_least("lines in the output", len(ids), num_lines)
    report.at_most("tokens charged beyond the output, or not", abs(spent - sum(usages)), 0)
    report.at_most("tokens in the ledger beyond the output, or not", abs(booked - sum(usages)), 0)
    report.at_most(
        "tokens told of the batch beyond the output, or not", abs(found["usage"]["total_tokens"] - sum(usages)), 0
    )
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
