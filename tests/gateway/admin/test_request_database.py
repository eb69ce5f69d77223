"""The log of requests in SQLite and in Postgres: what is found again, after which end, and how large it becomes."""

import asyncio
import multiprocessing
import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.admin.live_requests import phases
from gateway.admin.request_database import MAX_PENDING_ROWS, MAX_SEARCHES, RequestDatabase
from gateway.admin.request_search import RequestLogReader, parsed
from gateway.admin.request_storage import VERSION, RequestStorage, SqliteStorage
from gateway.admin.request_summary import RequestSummary
from gateway.errors import BadRequest, RateLimited, RequestLogUnavailable, RequestNotFound
from tests.gateway.admin.postgres_server import postgres_server
from tests.gateway.telemetry.records import BEGAN_NS, a_record, a_timeline

BEGAN = BEGAN_NS / 1e9
DAY = 86_400.0
MIB = 2**20


class Site:
    """A log whose clock tests set, and its reader."""

    def __init__(self, storage: Callable[[int], RequestStorage], max_bytes: int = MIB, url: str = "") -> None:
        self.now, self.url = BEGAN + 10, url  # of the database
        self.storage = storage
        self.database = RequestDatabase(storage(max_bytes), DAY, lambda: self.now)
        self.reader = RequestLogReader(self.database, lambda: self.now)

    def end(self, name: str, after: float = 0.0, **changes: Any) -> RequestSummary:
        """A request whose response is `name` ends 80 ms and `after` seconds after `BEGAN`."""
        values = {"request_id": f"req_{name}", "response_id": name, "began_ns": BEGAN_NS + round(after * 1e9)}
        summary = RequestSummary.of(a_record(**values | changes))
        self.database.add(summary)
        return summary

    async def names(self, **query: str) -> list[str | None]:
        return [row["response_id"] for row in (await self.reader.listed(query))["requests"]]


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "requests.sqlite"


@pytest.fixture
def file_site(path: Path) -> Site:
    return Site(lambda max_bytes: SqliteStorage(path, max_bytes))


@pytest.fixture
def postgres_site(postgres_url: str) -> Site:
    psycopg = import_module("psycopg")
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP SCHEMA IF EXISTS sluice CASCADE")
    storage = import_module("gateway.admin.request_postgres").PostgresStorage
    return Site(lambda max_bytes: storage(postgres_url, max_bytes), url=postgres_url)


@pytest.fixture(params=["file_site", "postgres_site"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made: Site = request.getfixturevalue(request.param)
    yield made
    asyncio.run(made.database.close())


async def test_each_filter_finds_what_meets_it_the_newest_first(site: Site) -> None:
    refusal = {"error": RateLimited("no"), "outcome": Outcome.REFUSED, "status": 429}
    slow = a_timeline(first_token=103.0, ended=104.0)
    site.end("a", 1.0, tenant="acme", key="k1", session="s1", model="m1", service_class="fast")
    site.end("b", 2.0, tenant="globex", key="k2", ended=104.5, timelines=[slow])
    site.end("c", 3.0, tenant="acme", key="k2", **refusal)
    assert await site.names() == ["b", "c", "a"]  # b ended last
    for query, found in (
        ({"tenant": "acme"}, ["c", "a"]),
        ({"key": "k2"}, ["b", "c"]),
        ({"session": "s1"}, ["a"]),
        ({"model": "m1", "class": "fast"}, ["a"]),
        ({"id": "req_b"}, ["b"]),
        ({"id": "b"}, ["b"]),
        ({"status": "429"}, ["c"]),
        ({"status": "2xx"}, ["b", "a"]),
        ({"code": "rate_limit_exceeded"}, ["c"]),
        ({"outcome": "refused"}, ["c"]),
        ({"min_seconds": "2s"}, ["b"]),
        ({"min_ttft": "2.5s"}, ["b"]),
        ({"since": str(BEGAN + 2.5)}, ["b", "c"]),
        ({"until": str(BEGAN + 2.5)}, ["a"]),
        ({"since": "8s", "tenant": "acme"}, ["c"]),
        ({"tenant": ""}, ["b", "c", "a"]),
        ({"tenant": "nobody"}, []),
    ):
        assert await site.names(**query) == found, query


async def test_pages_follow_one_another_without_a_gap_among_equal_moments(site: Site) -> None:
    for number in range(7):
        site.end(str(number))
    seen, place = [], None
    while True:
        page = await site.reader.listed({"limit": "3"} | ({"before": place} if place else {}))
        seen += [row["response_id"] for row in page["requests"]]
        place = page["next"]
        if place is None:
            break
        site.end("newer", 1.0)
    assert seen == ["6", "5", "4", "3", "2", "1", "0"]


async def test_a_request_is_shown_whole_as_it_was(site: Site) -> None:
    kept = site.end("a", error=RateLimited("Too much."), outcome=Outcome.REFUSED)
    ((found,), _) = await site.database.search(parsed({"id": "a"}, site.now))
    assert found == kept
    assert (await site.reader.shown("a"))["timeline"] == [span.to_json() for span in phases(kept)]
    site.end("b", request_id="req_a")
    with pytest.raises(BadRequest, match=r"2 requests have the id 'req_a': .*b, a"):
        await site.reader.shown("req_a")
    with pytest.raises(RequestNotFound, match="'x' is live or in the log"):
        await site.reader.shown("x")


async def test_texts_of_clients_are_data(site: Site) -> None:
    hostile = "'; DROP TABLE requests; --\x1b[31m<img src=x>\u202e"
    site.end("a", tenant=hostile, session=hostile, model="lone \ud800 surrogate", path="/\udcff")
    site.end("c", 1.0, model="a\0b \\u0000", session="c\0d")
    site.end("b", error=RateLimited("lone \ud800 surrogate"))
    assert await site.names(tenant=hostile, session=hostile) == ["a"]
    assert await site.names() == ["c", "b", "a"]
    assert await site.names(model="a\ufffdb \\u0000") == ["c"]


@pytest.mark.parametrize("damage", ["no JSON", "{}", '{"ended": 1, "began": 1, "outcome": "odd"}', "[]"])
async def test_a_damaged_row_is_told_once_and_the_others_are_found(
    file_site: Site, path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    for number, name in enumerate("abc"):
        file_site.end(name, float(number))
    file_site.database.write()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE requests SET summary = ? WHERE response_id = 'b'", [damage])
    told = list[int]()
    for _ in range(2):
        assert await file_site.names() == ["c", "a"]
        assert await file_site.names(status="200", min_seconds="1ms") == ["c", "a"]
        assert await file_site.database.texts("b") is None
        told.append(caplog.text.count(f"the stored value row 2 of {path} is damaged"))
    with pytest.raises(RequestNotFound):
        await file_site.reader.shown("b")
    assert told[0] == told[1] > 0


async def test_the_oldest_go_when_there_is_no_room_or_their_time_has_passed(site: Site, path: Path) -> None:
    site = Site(site.storage, max_bytes=4 * MIB, url=site.url)
    for number in range(9000):
        site.end(f"{number:04d}", number / 1000)
        if number % 3000 == 2999:
            site.now += 60
            site.database.write()
    site.now += 60
    site.database.write()
    (newest, *_), (oldest,) = await site.names(limit="1"), await site.names(id="0000") or [None]
    assert (newest, oldest) == ("8999", None)
    assert _stored_bytes(site, path) < 5 * MIB

    site.now = BEGAN + DAY + 8.5
    site.database.write()
    left = await site.names(limit="500", until=str(BEGAN + 8.6))
    assert (left[0], left[-1]) == ("8519", "8420")  # each ended 80 ms after it began
    await site.database.close()


def _stored_bytes(site: Site, path: Path) -> int:
    """The bytes on the disk, of a table once it was vacuumed."""
    if path.exists():
        return path.stat().st_size
    with import_module("psycopg").connect(site.url, autocommit=True) as connection:
        connection.execute("VACUUM FULL sluice.requests")
        (size,) = connection.execute("SELECT pg_total_relation_size('sluice.requests')").fetchone()
    return int(size)


async def test_the_table_is_counted_only_when_it_seems_full(postgres_site: Site) -> None:
    """An operator may have deleted rows."""
    site = postgres_site
    for told, counted in ((7, 7), (2 * MIB, 0)):
        site.end("a")
        site.database.write()
        with import_module("psycopg").connect(site.url, autocommit=True) as connection:
            connection.execute("DELETE FROM sluice.requests")
            connection.execute("UPDATE sluice.request_log SET bytes = %s", [told])
            await site.database.close()
            site = Site(site.storage, url=site.url)
            assert await site.names() == []
            assert connection.execute("SELECT bytes FROM sluice.request_log").fetchone() == (counted,)
    await site.database.close()


def test_the_table_is_counted_again_after_an_hour(postgres_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    moments, counts = list[float](), list[float]()
    storage: Any = postgres_site.storage(MIB)
    clock = SimpleNamespace(monotonic=lambda: moments[-1])
    monkeypatch.setattr("gateway.admin.request_postgres.time", clock)
    monkeypatch.setattr(storage, "_delete_oldest", lambda before: (2 * MIB, 0))
    monkeypatch.setattr(storage, "_count", lambda: counts.append(moments[-1]) or 0)
    for moment in (10.0, 20.0, 3609.0, 3610.0):
        moments.append(moment)
        storage.evict(0.0)
    assert counts == [10.0, 3610.0]


async def test_a_page_has_no_texts_and_one_request_has_its_own(site: Site) -> None:
    summary = RequestSummary.of(a_record(request_id="req_a", response_id="a", began_ns=BEGAN_NS))
    site.database.add(summary, lambda: [{"prompt": "a secret", "answer": "b"}])
    site.database.write()
    assert (await site.database.search(parsed({}, site.now)))[0] == [summary]
    ((_, _, found),) = site.storage(MIB).search(parsed({}, site.now))
    assert "secret" not in found
    assert await site.database.texts("a") == [{"prompt": "a secret", "answer": "b"}]


async def test_nothing_written_is_lost_by_a_kill(site: Site) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(site,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert await site.names() == ["written"]


def _write_and_die(site: Site) -> None:
    site.end("written")
    site.database.write()
    site.end("pending")
    os.kill(os.getpid(), signal.SIGKILL)


async def test_gateways_share_a_log(site: Site, path: Path, request: pytest.FixtureRequest) -> None:
    others = [Site(site.storage) for _ in range(3)]
    site.end("a")
    for number, other in enumerate(others):
        other.end(f"b{number}", 1.0 + number)
    await asyncio.gather(*(asyncio.to_thread(one.database.write) for one in (site, *others)))
    for one in (site, *others):
        assert await one.names() == ["b2", "b1", "b0", "a"]
    assert {file.stat().st_mode & 0o777 for file in path.parent.glob("*")} == (
        {0o600} if request.node.callspec.params["site"] == "file_site" else set()
    )
    await asyncio.gather(*(other.database.close() for other in others))


async def test_searches_leave_threads_to_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def in_thread(search: Callable[[Any], Any], asked: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return search(asked)

    monkeypatch.setattr(asyncio, "to_thread", in_thread)
    site.end("a")
    assert await asyncio.gather(*(site.names() for _ in range(8))) == [["a"]] * 8
    assert most == MAX_SEARCHES


async def test_a_file_that_cannot_be_written_costs_no_request_until_memory_is_full(file_site: Site, path: Path) -> None:
    site = file_site
    _damage(path)
    site.end("a")
    site.database.write()
    with pytest.raises(RequestLogUnavailable, match=r"requests\.sqlite cannot be read \(file is not a database\)"):
        await site.names()
    _delete(path)
    assert await site.names() == ["a"]

    _damage(path)
    for number in range(MAX_PENDING_ROWS + 5):
        site.end(str(number))
    assert site.database.num_lost == 5
    await site.database.close()


def _delete(path: Path) -> None:
    path.unlink()


def _damage(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"no database" * 1000)


async def test_a_server_that_is_away_costs_no_request_and_has_them_later(postgres_site: Site) -> None:
    site, storage = postgres_site, postgres_site.storage(MIB)
    gone = type(storage)("postgresql://sluice:secret@127.0.0.1:1/logs", MIB)
    away = Site(lambda _: gone)
    away.end("a")
    away.database.write()
    with pytest.raises(RequestLogUnavailable, match=r"the database logs at 127\.0\.0\.1 cannot be read") as caught:
        await away.names()
    assert "secret" not in str(caught.value)
    away.database._storage = storage  # it came back
    assert await away.names() == ["a"] == await site.names()
    await asyncio.gather(away.database.close(), site.database.close())


def _raise_version(site: Site, path: Path) -> None:
    if path.exists():
        with sqlite3.connect(path) as connection:
            connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    else:
        with import_module("psycopg").connect(site.url) as connection:
            connection.execute("UPDATE sluice.request_log SET version = version + 1")


async def test_a_log_of_a_newer_version_is_left_alone(site: Site, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site.end("a")
    assert await site.names() == ["a"]
    await site.database.close()
    _raise_version(site, path)
    site.end("b")
    site.database.write()
    assert await site.names() == ["a"]
    assert re.search("its version is 2, of a newer Sluice|its tables are of version 2", caplog.text)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"staus": "429"}, "'staus' filters no requests; use tenant, .*status"),
        ({"status": "42"}, "status must be an HTTP status such as 429"),
        ({"status": "6xx"}, "status must be an HTTP status such as 429"),
        ({"since": "yesterday"}, "since must be a moment such as 2027-01-31T14:00Z"),
        ({"since": "9" * 400}, "since must be a moment"),
        ({"min_seconds": "2"}, "min_seconds must be a duration such as 500ms or 2s, got '2'"),
        ({"limit": "501"}, "limit must be a number from 1 to 500"),
        ({"before": "1_x"}, "before must be the `next` of an earlier answer"),
    ],
)
def test_a_search_that_cannot_be_read_names_the_parameter(query: dict[str, str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parsed(query, BEGAN)


def test_moments_are_read_as_iso_8601_unix_seconds_or_a_time_ago() -> None:
    for text in ("2027-01-15T08:00:00Z", "2027-01-15T09:00+01:00", "2027-01-15 08:00", "1800000000", "1h"):
        assert parsed({"since": text}, 1_800_003_600.0).since == 1_800_000_000, text


async def test_without_a_log_the_reader_says_so() -> None:
    reader = RequestLogReader(None, lambda: BEGAN)
    with pytest.raises(RequestLogUnavailable, match="--request-log-bytes is 0"):
        await reader.listed({})
    with pytest.raises(RequestNotFound):
        await reader.shown("a")
