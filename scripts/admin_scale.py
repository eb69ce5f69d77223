"""Opens each view of the admin page of a gateway with 10,000 tenants and 100,000 keys: `python -m scripts.admin_scale`.

For each view at 1440 and 800 px: the time from the click until all its tables are there, what is cut off, and a
screenshot; for each path of the API the time of its answer, and the most CPU time for which it held the event loop at
once.
"""

import asyncio
import json
import sys
import time
from argparse import ArgumentParser
from base64 import b64decode
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis.asyncio import Redis

from gateway.settings.settings import Settings
from gateway.tenants.auth import new_key, pepper_of
from gateway.tenants.key_store import KeyStore
from labs.benchmarks.report import RESULTS
from quotas.policy.limit import EPOCH
from quotas.policy.policy import Policy
from quotas.policy.policy_file import parse_policy
from quotas.reservation import Ask, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import LUA
from scripts.stepped_admin_server import MARK
from tests.end_to_end.page.browser import Chromium, find_chromium, running_chromium
from tests.end_to_end.page.page_object import Page
from tests.gateway.server_process import ServerProcess, running_server
from tests.quotas.servers import BINARIES, running

RESULT = RESULTS / "admin_scale.json"
WIDTHS = (1440, 800)
NUM_REQUESTS = 30  # in the log
ROWS = {
    "now": "#tenants tbody tr",
    "policy": "#policy-tenants tbody tr",
    "keys": "#keys-table tbody tr",
    "usage": "#usage-table tbody tr",
    "log": "#log-table tbody tr",
}
SHOWN = """document.querySelector(%s)?.checkVisibility() && [...document.querySelectorAll('#view-%s .foot')].every(
  foot => !foot.checkVisibility() || !foot.textContent.startsWith('Being read'))"""
CUT = """[...document.querySelectorAll('#view-%s .scroller')].filter(box => box.offsetParent
  && box.scrollWidth > box.clientWidth).map(box => box.parentElement.id)
  .concat(document.documentElement.scrollWidth > innerWidth ? ['the page'] : [])"""
LISTS = {"keys": "keys", "usage?contains=tenant": "rows", "budgets": "budgets"}  # by path: the field of the rows
SEARCHES = ("tenants?contains=0999", "keys?contains=0999", "policy?contains=0999")
PATHS = (
    "overview",
    "tenants",
    "tenants/tenant-00007",
    "policy",
    "policy/text",
    "keys",
    "usage",
    "budgets",
    "audit",
    "request-log",
)


def make_policy(num_tenants: int) -> str:
    """Each tenant has a weight, limits, and a budget in money with an alert."""
    alert = "{at: 80%, url: 'https://hooks.example.com/T0/budgets'}"
    rows = (
        f"  tenant-{number:05d}: {{weight: {1 + number % 4}, team: team-{number % 50:02d}, limits: {{tokens: 1M/min, "
        f"cost: {{budget: {10 + number % 90}/month, alerts: [{alert}]}}}}}}\n"
        for number in range(num_tenants)
    )
    teams = "".join(f"  team-{number:02d}: {{currency: USD, limits: {{cost: 5000/month}}}}\n" for number in range(50))
    prices = "defaults: {price: {input: 1/1k, output: 2/1k, currency: USD}}\n"
    return f"{prices}teams:\n{teams}tenants:\n{''.join(rows)}"


def make_keys(state: Path, num_tenants: int, num_keys: int) -> None:
    """Keys of all tenants, each made a minute after the one before; every tenth has a limit of its own, and every
    hundredth a budget.
    """
    store = KeyStore(state)
    pepper, now = pepper_of(Settings(state_dir=state), store), datetime.now(UTC)
    with store.edit() as records:
        for number in range(num_keys):
            _, record = new_key(f"tenant-{number % num_tenants:05d}", pepper, name=f"service {number}")
            limits = {"requests": "60/min"} | ({"cost": "5/month"} if number % 100 == 0 else {})
            settings = json.dumps({"limits": limits}) if number % 10 == 0 else ""
            made = now - timedelta(minutes=num_keys - number)
            records[record.id] = replace(record, created=made, settings=settings)


BOOK = """
for number = 0, ARGV[1] - 1 do
  local tenant = string.format('sluice:{tenant-%05d}', number)
  for row = 1, ARGV[3] + 0 do book(tenant, 'key-' .. row .. '|embedded|standard', 9, 9000, 3000, 900, 1e9) end
  book(tenant, '*', 0, 0, 0, 0, 0, 2e6)
end"""


async def spend(url: str, policy: Policy, num_days: int, num_rows: int) -> None:
    """Use of each tenant on each of the days before, in these rows and one of engine time, and a request today, which
    its limits count.
    """
    level, ledger = ((LUA / f"{part}.lua").read_text() for part in ("level", "ledger"))
    clock = "local function clock() return ARGV[2] * DAY end"
    source, today = f"{level}\n{clock}\n{ledger}\n{BOOK}", (datetime.now(UTC).date() - EPOCH).days
    async with Redis.from_url(url) as redis:
        for day in range(today - num_days + 1, today):
            await redis.eval(source, 0, str(len(policy.tenants)), str(day), str(num_rows))
            await redis.hset(f"sluice:running:{day}", "a replica", str(86_400 * 10**6))
    store = RedisStore.at(url, 60.0)
    await store.connect()
    names = list(policy.tenants)
    for start in range(0, len(names), 100):
        some, ask = names[start : start + 100], Ask(1, 5000, 1000)
        reserved = (store.reserve(name, None, policy.tenant(name).limits_of(), ask) for name in some)
        grants = await asyncio.gather(*reserved)
        used = (Usage(7919 * number % 5000, 1000) for number in range(start, start + len(some)))
        await asyncio.gather(*map(store.settle, grants, used))
    await store.close()


def look(page: Page, server: ServerProcess, pictures: Path | None) -> list[dict[str, Any]]:
    """Open each view at each width."""
    found = []
    page.go(f"{server.admin_url}/")
    page.until_shown("#sign-in")
    page.sign_in(server.admin_key)
    page.until_shown(ROWS["now"])
    for width in WIDTHS:
        page.resize(width)
        page.reload()  # or the views would have the rows of before
        for view, rows in ROWS.items():
            began = time.perf_counter()
            page.click(f"#views [href='#/{view}']")
            page.until(SHOWN % (json.dumps(rows), view))
            seconds = time.perf_counter() - began
            found.append({"view": view, "width": width, "seconds": round(seconds, 3), "cut": page.js(CUT % view)})
            if pictures is not None:
                page.send("Page.bringToFront")
                shot = page.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
                (pictures / f"{view}-{width}.png").write_bytes(b64decode(shot["data"]))
    return found


def count(server: ServerProcess) -> dict[str, int]:
    """The number of rows of each list, with those that an answer leaves out."""
    told = {path: server.admin(path) for path in LISTS}
    return {path: len(answer[LISTS[path]]) + answer["truncated"] for path, answer in told.items()}


def ask(server: ServerProcess) -> dict[str, float]:
    """The quickest of three answers to each path, in seconds."""
    seconds = dict[str, float]()
    for path in (*PATHS, *SEARCHES):
        for _ in range(3):
            began = time.perf_counter()
            reply = server.ask_admin(path)
            assert reply.is_success, f"{path}: {reply.text}"
            seconds[path] = round(min(seconds.get(path, 60.0), time.perf_counter() - began), 3)
    return seconds


def measure(
    num_tenants: int,
    num_keys: int,
    num_days: int,
    num_rows: int,
    chromium: Chromium | None,
    pictures: Path | None = None,
    *,
    warm: bool = False,
) -> dict[str, Any]:
    """What a gateway of this size shows, in how much time; without a browser what its API answers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        policy, text = folder / "policy.yaml", make_policy(num_tenants)
        policy.write_text(text)
        make_keys(folder / "state", num_tenants, num_keys)
        url = stack.enter_context(running(BINARIES["valkey"], folder))
        asyncio.run(spend(url, parse_policy({policy.name: text.encode()}), num_days, num_rows))
        flags = (
            f"--policy={policy}",
            f"--redis-url={url}",
            "--threads=1",
            "--redis-timeout=10",
            "--machine-price=3.50/h",
        )
        program = "scripts.stepped_admin_server"
        with running_server(folder, *flags, program=program, warm=warm) as server:
            for _ in range(min(NUM_REQUESTS, num_tenants)):
                assert server.answers()
            answers, lists, views = ask(server), count(server), list[dict[str, Any]]()
            if chromium is not None:
                with chromium.opened_page(width=WIDTHS[0]) as page:
                    views = look(page, server, pictures)
        said = server.log.read_text()
    holds = json.loads(said[said.index(MARK) + len(MARK) :].splitlines()[0])
    longest = dict(sorted(((path, round(1000 * held, 2)) for path, held in holds.items()), key=lambda one: -one[1]))
    shown = {"tenants": num_tenants, "keys": num_keys, "days": num_days, "rows": num_rows}
    shown |= {"lists": lists, "views": views}
    return shown | {"answers_s": answers, "longest_hold_cpu_ms": longest}


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--days", type=int, default=1, help="days of the ledger on which each tenant has use")
    parser.add_argument("--rows", type=int, default=1, help="rows of each of these, such as keys, beside engine time's")
    parser.add_argument("--pictures", type=Path, help="folder for the screenshots")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    binary = find_chromium()
    if binary is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    with running_chromium(binary) as chromium:
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
        result = measure(options.tenants, options.keys, options.days, options.rows, chromium, options.pictures)
    print(json.dumps(result, indent=1))
    if options.record:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
