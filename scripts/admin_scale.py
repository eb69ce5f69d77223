"""Opens each view of the admin page of a gateway with 10,000 tenants and 100,000 keys: `python -m scripts.admin_scale`.

For each view at 1440 and 800 px: the time from the click to its rows, what is cut off, and a screenshot; for each path
of the API the time of its answer, and the most CPU time for which it held the event loop at once.
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
from quotas.policy.limit import EPOCH, Limit, Resource
from quotas.reservation import Ask, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import LUA
from scripts.stepped_admin_server import MARK
from tests.end_to_end.page.browser import find_chromium, running_chromium
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
SHOWN = "document.querySelector(%s)?.checkVisibility()"  # asked at each frame; `until_shown` looks twice a second
CUT = """[...document.querySelectorAll('#view-%s .scroller')].filter(box => box.offsetParent
  && box.scrollWidth > box.clientWidth).map(box => box.parentElement.id)
  .concat(document.documentElement.scrollWidth > innerWidth ? ['the page'] : [])"""
SEARCHES = ("tenants?contains=0999", "keys?contains=0999", "policy?contains=0999")
PATHS = (
    "overview",
    "tenants",
    "tenants/tenant-00042",
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
    rows = (
        f"  tenant-{number:05d}: {{weight: {1 + number % 4}, team: team-{number % 50:02d}, limits: {{tokens: 1M/min, "
        f"cost: {10 + number % 90}/month}}}}\n"
        for number in range(num_tenants)
    )
    teams = "".join(f"  team-{number:02d}: {{currency: USD, limits: {{cost: 5000/month}}}}\n" for number in range(50))
    prices = "defaults: {price: {input: 1/1M, output: 2/1M, currency: USD}}\n"
    return f"{prices}teams:\n{teams}tenants:\n{''.join(rows)}"


def make_keys(state: Path, num_tenants: int, num_keys: int) -> None:
    """Keys of all tenants, each made a minute after the one before; every tenth has a limit of its own."""
    store = KeyStore(state)
    pepper, now = pepper_of(Settings(state_dir=state), store), datetime.now(UTC)
    with store.edit() as records:
        for number in range(num_keys):
            _, record = new_key(f"tenant-{number % num_tenants:05d}", pepper, name=f"service {number}")
            settings = '{"limits": {"requests": "60/min"}}' if number % 10 == 0 else ""
            made = now - timedelta(minutes=num_keys - number)
            records[record.id] = replace(record, created=made, settings=settings)


BOOK = """
for number = 0, ARGV[1] - 1 do
  book(string.format('sluice:{tenant-%05d}', number), '*', 9, 9000, 3000, 900, 1e9)
end"""


async def spend(url: str, num_tenants: int, num_days: int) -> None:
    """Use of each tenant on each of the days before, in one row, and a request today."""
    level, ledger = ((LUA / f"{part}.lua").read_text() for part in ("level", "ledger"))
    clock = "local function clock() return ARGV[2] * DAY end"
    source, today = f"{level}\n{clock}\n{ledger}\n{BOOK}", (datetime.now(UTC).date() - EPOCH).days
    async with Redis.from_url(url) as redis:
        for day in range(today - num_days + 1, today):
            await redis.eval(source, 0, str(num_tenants), str(day))
    store = RedisStore.at(url, 60.0)
    await store.connect()
    limits = (Limit(Resource.CONCURRENT_REQUESTS, 1000),)
    usage = Usage(1000, 100)
    for start in range(0, num_tenants, 100):
        names = [f"tenant-{number:05d}" for number in range(start, min(start + 100, num_tenants))]
        grants = await asyncio.gather(*(store.reserve(name, None, limits, Ask(1, 1000, 100)) for name in names))
        await asyncio.gather(*(store.settle(grant, usage) for grant in grants))
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
            page.until(SHOWN % json.dumps(rows))
            seconds = time.perf_counter() - began
            found.append({"view": view, "width": width, "seconds": round(seconds, 3), "cut": page.js(CUT % view)})
            if pictures is not None:
                page.send("Page.bringToFront")
                shot = page.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
                (pictures / f"{view}-{width}.png").write_bytes(b64decode(shot["data"]))
    return found


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


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--days", type=int, default=1, help="days of the ledger in which each tenant has a row")
    parser.add_argument("--pictures", type=Path, help="folder for the screenshots")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    binary = find_chromium()
    if binary is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        policy = folder / "policy.yaml"
        policy.write_text(make_policy(options.tenants))
        make_keys(folder / "state", options.tenants, options.keys)
        url = stack.enter_context(running(BINARIES["valkey"], folder))
        asyncio.run(spend(url, options.tenants, options.days))
        flags = (f"--policy={policy}", f"--redis-url={url}", "--threads=1", "--redis-timeout=10")
        program = "scripts.stepped_admin_server"
        with running_server(folder, *flags, program=program, warm=False) as server:
            for _ in range(NUM_REQUESTS):
                assert server.answers()
            answers = ask(server)
            chromium = stack.enter_context(running_chromium(binary))
            with chromium.opened_page(width=1440) as page:
                views = look(page, server, options.pictures)
        said = server.log.read_text()
    holds = json.loads(said[said.index(MARK) + len(MARK) :].splitlines()[0])
    longest = dict(sorted(((path, round(1000 * held, 2)) for path, held in holds.items()), key=lambda one: -one[1]))
    result = {
        "tenants": options.tenants,
        "keys": options.keys,
        "days": options.days,
        "views": views,
        "answers_s": answers,
    }
    result |= {"longest_hold_cpu_ms": longest}
    print(json.dumps(result, indent=1))
    if options.record:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
