"""Four gateways on one Redis spend one limit in a burst: `python -m labs.benchmarks.quota_burst`.

`sluice serve` four times with the embedded model, one Redis between them, a budget that half of 1,000 requests fit
into. Each gateway has served the tenant before, so that each holds a slice of what is left. Then all requests come at
once, a quarter to each. A request uses exactly what it reserves: the sum of what was answered is what was admitted.
"""

import asyncio
import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from labs.benchmarks import machine
from labs.benchmarks.redis_server import RedisServer
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.served import Served, served

TENANT = "burst"
GATEWAYS = 4
BODY = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "Count from 3 to 12."}],
    "max_tokens": 4,
    "ignore_eos": True,
}
TIMEOUT_SECONDS = 300.0


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args(arguments)
    requests = 100 if options.quick else options.requests
    report = Report("quota_burst", options.quick)
    rows = [_measure(requests) for _ in range(1 if options.quick else options.runs)]
    report.add_table("one burst", [{name: Spread.of([row[name] for row in rows]) for name in rows[0]}])
    report.at_most("share of the limit admitted", max(row["share admitted"] for row in rows), 1.0)
    report.at_least("share of the limit admitted", min(row["share admitted"] for row in rows), 0.98)
    report.at_most("answers other than 200 and 429", max(row["neither"] for row in rows), 0)
    return report.finish(options.results)


def _measure(requests: int) -> dict[str, float]:
    core, _ = machine.two_cores()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder)
        store = stack.enter_context(RedisServer(directory))
        policy = directory / "policy.yaml"
        cost = _cost(directory, core)
        warm_up = 2 * GATEWAYS
        limit = cost * (requests // 2 + warm_up) + cost // 2
        policy.write_text(json.dumps({"tenants": {TENANT: {"limits": {"tokens": f"{limit}/month"}}}}))
        gateways = [
            stack.enter_context(
                served(
                    core,
                    [TENANT],
                    directory / str(index),
                    redis_url=store.url,
                    policy=policy,
                    max_num_seqs=64,
                    header_timeout=TIMEOUT_SECONDS,
                )
            )
            for index in range(GATEWAYS)
        ]
        statuses, warm, slices = asyncio.run(_burst(gateways, store, requests))
        admitted = (statuses[200] + warm) * cost
        return {
            "limit, tokens": limit,
            "set aside before, slices": slices,
            "admitted, tokens": admitted,
            "share admitted": admitted / limit,
            "answered": statuses[200],
            "refused": statuses[429],
            "neither": sum(statuses.values()) - statuses[200] - statuses[429],
        }


def _cost(directory: Path, core: int) -> int:
    """Tokens that one request uses."""
    with served(core, [TENANT], directory / "alone") as server:
        reply = httpx.post(_url(server), json=BODY, headers=_headers(server), timeout=TIMEOUT_SECONDS)
        cost: int = reply.json()["usage"]["total_tokens"]
        return cost


async def _burst(gateways: list[Served], store: RedisServer, requests: int) -> tuple[Counter[int], int, int]:
    limits = httpx.Limits(max_connections=requests)
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as client:

        async def status(gateway: Served) -> int:
            return (await client.post(_url(gateway), json=BODY, headers=_headers(gateway))).status_code

        warm = Counter([await status(gateway) for gateway in gateways for _ in range(2)])
        slices = len(list(store.client.hscan_iter(f"sluice:{{{TENANT}}}", match="s:*")))
        burst = await asyncio.gather(*(status(gateways[index % GATEWAYS]) for index in range(requests)))
        return Counter(burst), warm[200], slices


def _url(server: Served) -> str:
    return f"http://127.0.0.1:{server.port}/v1/chat/completions"


def _headers(server: Served) -> dict[str, str]:
    return {"authorization": f"Bearer {server.keys[TENANT]}"}


if __name__ == "__main__":
    sys.exit(main())
