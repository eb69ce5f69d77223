"""A simulation's figures of limits beside a gateway's: its event log under load, simulated with its own policy.

Tenants of the embedded model are held to one kind of limit each and offered more than it allows, on a timetable of
Poisson arrivals: refusals do not change later arrivals. Answers end where the model ends them, mostly long
before the tokens that were declared and reserved. The log is then served by simulation, on the step times that were
measured, under the policy that it was recorded with.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from gateway.telemetry.event_log_file import read_event_log
from labs.benchmarks import machine
from labs.benchmarks.load import post
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.served import Served, served
from labs.benchmarks.traffic import Due, Heard, Traffic
from labs.simulation.summary import TenantSummary
from labs.simulation.traces import Traffic as Recorded
from labs.simulation.traces import read_traffic
from labs.what_if.comparison import WhatIf, what_if
from quotas.policy.policy import Policy
from quotas.policy.policy_file import read_policy

POLICY = """\
tenants:
  by-requests: {limits: {requests: {rate: 1/s, burst: 3}}}
  by-tokens: {limits: {tokens: {rate: 40/s, burst: 400}}}
  by-budget: {limits: {output_tokens: 1k/day}}
  by-concurrency: {limits: {concurrent_requests: 1}}
  by-memory: {limits: {kv_bytes: 1MiB}}
  unlimited: {}
"""
TENANTS = ("by-requests", "by-tokens", "by-budget", "by-concurrency", "by-memory", "unlimited")
COUNTED = TENANTS[:3]
LIMITED = TENANTS[:4]  # that are refused something; the fourth for how long each step took just then
TENANT_REQUESTS_PER_SECOND = 2.0  # requests a second of each tenant
PROMPTS = ("Count from 3 to 12.", "Tell me a story about a fox and a river.", "What is 12 + 30?", "Hello!")
TOO_MANY = 429
DRAIN = 60.0  # seconds


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 4.0
    report = Report("what_if_live", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    figures: dict[str, dict[str, list[float]]] = {tenant: {} for tenant in TENANTS}
    for run in range(options.runs):
        _measure(options, server_core, run, figures)
    _tell(report, figures)
    return report.finish(options.results)


def _measure(options: Namespace, core: int, run: int, figures: dict[str, dict[str, list[float]]]) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        policy, log = directory / "policy.yaml", directory / "events.log"
        policy.write_text(POLICY)
        with served(core, TENANTS, directory / "state", policy=policy, event_log=log) as server:
            heard = _offer(server, run, options.seconds)
        recorded, held_to = read_traffic(log, log_lines=read_event_log), read_policy(policy)
    told = _simulated(recorded, held_to)
    again = {tenant.name: tenant for tenant in told.before.tenants}
    for tenant in TENANTS:
        for what, value in _compared(tenant, heard, again[tenant]).items():
            figures[tenant].setdefault(what, []).append(value)


def _simulated(recorded: Recorded, policy: Policy) -> WhatIf:
    return what_if(recorded, policy, policy, most_requests=len(recorded.arrivals), most_seconds=1e6)


def _offer(server: Served, run: int, seconds: float) -> Heard:
    with Traffic(server.port, refusals=(TOO_MANY,)) as clients:
        return clients.run(seconds + DRAIN, sorted(_timetable(server, run, seconds)), until_answered=True)


def _timetable(server: Served, run: int, seconds: float) -> Iterator[Due]:
    random = Random(run)
    for tenant in TENANTS:
        at = random.expovariate(TENANT_REQUESTS_PER_SECOND)
        while at < seconds:
            message = {"role": "user", "content": random.choice(PROMPTS)}
            body = {"model": "embedded", "messages": [message], "max_tokens": random.randint(40, 160), "stream": True}
            yield Due(at, tenant, post("/v1/chat/completions", body, server.keys[tenant]))
            at += random.expovariate(TENANT_REQUESTS_PER_SECOND)


def _compared(tenant: str, heard: Heard, again: TenantSummary) -> dict[str, float]:
    """The live and simulated figures of a tenant's requests, and of the first tokens of admitted ones."""
    offered, waits = len(heard.of(tenant)), heard.waits(tenant)
    live = heard.refused(tenant) / offered
    return {
        "offered": offered,
        "refused live": live,
        "refused simulated": again.refused / again.offered,
        "difference": abs(live - again.refused / again.offered),
        "first token live, ms": 1e3 * waits[len(waits) // 2],
        "simulated, ms": 1e3 * (again.first_token.p50 or 0.0),
    }


def _tell(report: Report, figures: dict[str, dict[str, list[float]]]) -> None:
    rows: list[dict[str, object]] = [
        {"tenant": tenant, **{what: Spread.of(values) for what, values in own.items()}}
        for tenant, own in figures.items()
    ]
    report.add_table("shares of each tenant's requests, and medians to the first token, over runs (extremes)", rows)
    report.notes = ["first tokens: as clients see them, and from the gateway's request to the core's token"]
    report.at_most("difference in what counted limits refused, the largest", _worst(figures, COUNTED), 0.05)
    report.at_most("difference in what was refused for running at once", _worst(figures, ("by-concurrency",)), 0.15)
    refused = [min(figures[tenant]["refused live"]) for tenant in LIMITED]
    report.at_least("least that a limited tenant was refused, or nothing is shown", min(refused), 0.1)


def _worst(figures: dict[str, dict[str, list[float]]], tenants: tuple[str, ...]) -> float:
    return max(median(figures[tenant]["difference"]) for tenant in tenants)


if __name__ == "__main__":
    sys.exit(main())
