import csv
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from io import StringIO
from threading import get_ident
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis import Redis

from gateway.admin import usage
from gateway.admin.usage import UsageReader
from gateway.api.service import Service
from gateway.errors import BadRequest, QuotaUnverifiable
from gateway.tenants import usage as tenants_usage
from gateway.tenants.key_source import KeySource
from gateway.tenants.key_store import KeyRecord
from quotas.damage import tell
from quotas.policy.limit import EPOCH
from quotas.policy.policy_file import parse_policy
from quotas.quotas import Quotas
from quotas.reservation import Usage
from quotas.store.redis_client import RedisClient
from quotas.store.redis_store import RedisStore
from quotas.store.usage_ledger import ENTRY, Ledger, LedgerRows, UsageLedger
from quotas.usage_row import SESSION, UsageRow, as_kept, row_name
from tests.gateway.spending import spend

POLICY = """
tenants:
  acme:
    price: {input: 0.5/1M, cached_input: 0.1/1M, output: 1.5/1M, currency: USD}
    limits: {tokens: [1k/min, 1k/day]}
    team: research
    keys: {k2: {limits: {requests: 5/month}}}
  beta: {price: {input: 1/1k, output: 2/1k, currency: EUR}}
teams: {research: {currency: USD, limits: {cost: 12.50/week}}}
"""
KEY = KeyRecord("k1", "acme", b"", datetime.now(UTC), settings='{"tags": {"project": "search"}}')
OWN = '{"limits": {"requests": "7/day"}}'
TODAY = datetime.now(UTC).date()
YESTERDAY = TODAY - timedelta(days=1)
DAYS = {"from": str(YESTERDAY), "to": str(TODAY)}


def reader_of(store: RedisStore, timeout: float) -> UsageReader:
    quotas = Quotas(store, timeout)
    policy = parse_policy({"policy.yaml": POLICY.encode()})
    service = SimpleNamespace(
        model="embedded",
        quotas=quotas,
        policies=SimpleNamespace(current=policy),
        keys=SimpleNamespace(tenants=lambda: {"carol"}),
    )
    return UsageReader(cast(Service, service), cast(KeySource, SimpleNamespace(in_force={"k1": KEY})))


@pytest.fixture
async def reader(redis_url: str) -> AsyncIterator[UsageReader]:
    store = RedisStore.at(redis_url, 5.0)
    await store.connect()
    yield reader_of(store, 5.0)
    await store.close()


@pytest.fixture
def spent(redis_url: str) -> None:
    """The store's clock never goes back."""
    spend(redis_url, "carol", "k3", Usage(7, 8), day=TODAY - timedelta(days=40))
    spend(redis_url, "acme", "k1", Usage(1000, 10), day=YESTERDAY)
    for key in ("k1", "k2"):
        spend(redis_url, "acme", key, Usage(1_000_000, 100_000, 400_000, 2e9), day=TODAY)
    spend(redis_url, "beta", None, Usage(3, 1), day=TODAY)


def shown(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    fields = ("tenant", "key", "requests", "input_tokens", "cached_tokens", "output_tokens", "costs")
    return [tuple(row[field] for field in fields) for row in report["rows"]]


async def test_usage_is_told_by_tenant_key_and_day_with_its_exact_cost(spent: None, reader: UsageReader) -> None:
    report = await reader.report(DAYS)
    assert shown(report) == [
        ("acme", None, 3, 2_001_000, 800_000, 200_010, {"USD": "0.980515"}),
        ("beta", None, 1, 3, 0, 1, {"EUR": "0.005"}),
    ]
    assert report["total"]["costs"] == {"EUR": "0.005", "USD": "0.980515"}
    assert [(day["day"], day["requests"]) for day in report["days"]] == [(str(YESTERDAY), 1), (str(TODAY), 3)]
    by_key = await reader.report(DAYS | {"by": "key", "tenant": "acme"})
    assert [(row["key"], row["requests"]) for row in by_key["rows"]] == [("k1", 2), ("k2", 1)]


async def test_models_cost_what_their_own_prices_say(redis_url: str) -> None:
    name = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2-finetuned"  # longer than in the ledger
    async with ledger(redis_url) as store:
        for model, usage in ((name, Usage(1000)), ("m", Usage(1000, 100, 400)), ("m", Usage(0, 5, requests=0))):
            store.book("acme", "k1", usage, row_name(UsageRow("k1", model, "batch")))
        await store.heartbeat()
        reader = reader_of(store, 5.0)
        prices = f"USD, models: {{{name}: {{input: 0.02/1M}}}}}}"
        text = POLICY.replace("USD}\n    limits", f"{prices}\n    limits")
        reader._service.policies.current = parse_policy({"policy.yaml": text.encode()})
        rows = {row["value"]: row["costs"]["USD"] for row in (await reader.report({"by": "model"}))["rows"]}
        assert rows == {as_kept(name): "0.00002", "m": "0.0004975"}
        by_tenant, csv_rows = await reader.report({}), list(csv.DictReader(StringIO(await reader.csv({}))))
        assert by_tenant["rows"][0]["costs"]["USD"] == csv_rows[0]["cost"] == "0.0005175"


async def test_a_tenants_month_is_one_question_to_the_store(
    spent: None, reader: UsageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, send_all = list[int](), RedisClient.send_all

    async def counted(self: RedisClient, packed: list[bytes]) -> list[Any]:
        calls.append(len(packed))
        return await send_all(self, packed)

    monkeypatch.setattr(RedisClient, "send_all", counted)
    report = await reader.report({"from": str(TODAY - timedelta(days=50)), "to": str(TODAY)})
    assert calls == [2 + len({YESTERDAY.month, TODAY.month})], "of acme's months, beta's and carol's"
    assert [(row["tenant"], row["requests"]) for row in report["rows"]] == [("acme", 3), ("carol", 1), ("beta", 1)]
    assert sum(day["requests"] for day in report["days"]) == report["total"]["requests"] == 5


async def test_a_period_in_which_nothing_was_used_is_as_long_as_it_is(reader: UsageReader) -> None:
    report = await reader.report({"from": "2020-01-01", "to": "2020-01-31"})
    assert (report["rows"], report["total"]["requests"], len(report["days"])) == ([], 0, 31)
    before = datetime.now(UTC).date()  # at midnight another than `TODAY`
    month = await reader.report({})
    days = (before, datetime.now(UTC).date())
    assert (month["from"], month["to"]) in [(str(day.replace(day=1)), str(day)) for day in days]


async def test_the_csv_is_that_of_the_command(spent: None, reader: UsageReader) -> None:
    rows = list(csv.DictReader(StringIO(await reader.csv(DAYS | {"by": "key"}))))
    assert [(row["day"], row["tenant"], row["key"], row["cost"]) for row in rows] == [
        (str(YESTERDAY), "acme", "k1", "0.000515"),
        (str(TODAY), "acme", "k1", "0.49"),
        (str(TODAY), "acme", "k2", "0.49"),
        (str(TODAY), "beta", "", "0.005"),
    ]


@pytest.mark.parametrize(("most_words", "most_questions"), [(400_000, 7), (0, 14)])
async def test_long_ledgers_are_in_their_places_and_read_side_by_side_as_far_as_they_may_be_held(
    reader: UsageReader, redis_url: str, monkeypatch: pytest.MonkeyPatch, most_words: int, most_questions: int
) -> None:
    questions, send_all = list[int](), RedisClient.send_all

    async def counted(self: RedisClient, packed: list[bytes]) -> list[Any]:
        questions.append(len(packed))
        return await send_all(self, packed)

    monkeypatch.setattr(RedisClient, "send_all", counted)
    monkeypatch.setattr(tenants_usage, "MAX_WORDS_HELD", most_words)
    today, month = ((day - EPOCH).days for day in (TODAY, TODAY.replace(day=1)))
    with Redis.from_url(redis_url) as client:
        for tenant, num_rows in (("a", 2), ("b", 1500), ("c", 1500), ("d", 2)):
            fields = {f"1 k{number:04}": ENTRY.pack(today, 1, 10, 0, 1, 0, 0, 0) for number in range(num_rows)}
            client.hset(f"sluice:{{{tenant}}}:ledger:{month}", mapping=fields)
    query = {"from": str(TODAY), "to": str(TODAY), "by": "key"}
    rows = [(row["tenant"], row["key"]) for row in csv.DictReader(StringIO(await reader.csv(query)))]
    assert len(rows) == len(set(rows)) == 3004 and rows == sorted(rows)
    assert max(questions[1:]) == (2 if most_words else 1) and len(questions) <= most_questions
    assert (await reader.report(query))["total"]["requests"] == 3004


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"from": "yesterday"}, "from"),
        ({"to": "2026-02-30"}, "to"),
        ({"from": "2026-02-02", "to": "2026-02-01"}, "from"),
        ({"from": "2020-01-01", "to": "2026-01-01"}, "from"),
        ({"by": "colour"}, "by"),
    ],
)
async def test_a_malformed_period_is_refused_by_its_field(
    reader: UsageReader, query: dict[str, str], field: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        await reader.report(query)
    assert refused.value.param == field


async def test_more_ledgers_than_one_answer_reads_are_refused(
    spent: None, reader: UsageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_LEDGERS", 1)
    for read in (reader.report, reader.csv):
        with pytest.raises(BadRequest, match="2 ledgers, each of a tenant and a month"):
            await read(today := {"from": str(TODAY), "to": str(TODAY)})
    assert (await reader.report(today | {"tenant": "acme"}))["total"]["requests"] == 2


async def test_budgets_tell_what_is_left_the_least_first(reader: UsageReader, redis_url: str) -> None:
    told = await reader.budgets()
    fields = ("team", "tenant", "key", "resource", "period", "left", "currency")
    assert [tuple(row[field] for field in fields) for row in told["budgets"]] == [
        ("research", None, None, "cost", "week", 12.5, "USD"),
        (None, "acme", None, "tokens", "day", 1000, None),
        (None, "acme", "k2", "requests", "month", 5, None),
    ]
    assert [row["key"] for row in (await reader.budgets("k2"))["budgets"]] == ["k2"]
    settings = {"k8": '{"limits": {"requests": "60/min"}}', "k9": '{"limits": {"requests": "7/day"}}'}
    own = {name: KeyRecord(name, "beta", b"", datetime.now(UTC), settings=text) for name, text in settings.items()}
    cast(Any, reader)._keys.in_force = own
    told = await reader.budgets("beta")
    assert [(row["key"], row["left"]) for row in told["budgets"]] == [("k9", 7)]


def test_owners_of_budgets_are_teams_then_tenants_then_keys() -> None:
    own = KeyRecord("k0", "acme", b"", datetime.now(UTC), settings='{"limits": {"requests": "7/day"}}')
    policy = parse_policy({"policy.yaml": f"{POLICY}defaults: {{limits: {{tokens: 2k/day}}}}".encode()})
    owners, _ = usage._owners(policy, ["carol"], [own], "")
    assert [owner.team or owner.key or owner.tenant for owner in owners] == [
        "research",
        "acme",
        "beta",
        "carol",
        "k2",
        "k0",
    ]


async def test_owners_of_budgets_are_found_once_for_a_policy_and_its_keys(
    reader: UsageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, find = list[str](), usage._owners

    def counted(*asked: Any) -> Any:
        found.append(asked[-1])
        return find(*asked)

    monkeypatch.setattr(usage, "_owners", counted)
    for _ in range(2):
        await reader.budgets()
    assert found == [""]
    assert [row["tenant"] for row in (await reader.budgets("ACME"))["budgets"]] == ["acme", "acme"]
    cast(Any, reader)._keys.in_force = {"k9": KeyRecord("k9", "acme", b"", datetime.now(UTC), settings=OWN)}
    assert len((await reader.budgets("acme"))["budgets"]) == 3
    policy = f"{POLICY}defaults: {{limits: {{tokens: 2k/day}}}}"
    reader._service.policies.current = parse_policy({"policy.yaml": policy.encode()})
    assert len((await reader.budgets())["budgets"]) == 6
    assert found == ["", "acme", "acme", ""]


async def test_a_store_that_is_away_is_said_to_be(redis_url: str) -> None:
    reader = reader_of(RedisStore.at(redis_url, 0.1), 0.1)  # to which nobody has connected
    with pytest.raises(QuotaUnverifiable):
        await reader.report({"from": str(date(2026, 1, 1)), "to": str(date(2026, 1, 2)), "tenant": "acme"})
    assert all(row["left"] is None for row in (await reader.budgets())["budgets"])


@pytest.mark.parametrize("count", [float("nan"), 1e300, -1e300])
@pytest.mark.parametrize("place", range(7))
async def test_damaged_values_are_told_and_passed_over(
    spent: None, reader: UsageReader, redis_url: str, caplog: pytest.LogCaptureFixture, place: int, count: float
) -> None:
    tell.cache_clear()
    sound, sound_csv = await reader.report(DAYS), await reader.csv(DAYS)
    day, month = (TODAY - EPOCH).days, (TODAY.replace(day=1) - EPOCH).days
    counts: list[float] = [1, 1, 0, 1, 0, 0, 0]
    counts[place] = count
    odd = {f"{day // 8} odd": b"short", f"{day // 8} {{}}": ENTRY.pack(day, *counts)}
    with Redis.from_url(redis_url) as client:
        client.set(f"sluice:{{gone}}:ledger:{month}", "text")
        client.hset(f"sluice:{{beta}}:ledger:{month}", mapping=odd)
    report = await reader.report(DAYS)
    assert report == sound | {"damaged": 3} and await reader.csv(DAYS) == sound_csv
    assert f"{{gone}}:ledger:{month}" in caplog.text and "WRONGTYPE" in caplog.text
    assert f"{{beta}}:ledger:{month}" in caplog.text and "5 bytes of" in caplog.text
    caplog.clear()
    await reader.report(DAYS)
    assert not caplog.text, "each is told once"
    with Redis.from_url(redis_url) as client:
        client.hset(f"sluice:{{beta}}:ledger:{month}", b"1 \xff", ENTRY.pack(day, 1, 5, 0, 1, 0, 0, 0))
    rows = (await reader.report(DAYS | {"by": "key", "tenant": "beta"}))["rows"]
    assert [(row["key"], row["input_tokens"]) for row in rows] == [("\ufffd", 5), (None, 3)], "any name is one"


async def test_what_is_taken_back_a_day_after_and_much_kv_memory_are_no_damage(
    reader: UsageReader, redis_url: str
) -> None:
    day, month = (TODAY - EPOCH).days, (TODAY.replace(day=1) - EPOCH).days
    with Redis.from_url(redis_url) as client:
        client.hset(f"sluice:{{gone}}:ledger:{month}", f"{day // 8} k", ENTRY.pack(day, -1, -5, 0, 9, 2.0**60, 0, 0))
    report = await reader.report(DAYS | {"by": "key", "tenant": "gone"})
    assert [(row["requests"], row["input_tokens"], row["kv_byte_seconds"]) for row in report["rows"]] == [
        (-1, -5, 2**60)
    ]
    (row,) = csv.DictReader(StringIO(await reader.csv(DAYS | {"by": "key", "tenant": "gone"})))
    counts = [int(row[name].lstrip("'")) for name in ("requests", "input_tokens", "kv_byte_seconds")]
    assert counts == [-1, -5, 2**60]


@pytest.mark.parametrize(
    ("field", "value", "num_damaged"),
    [
        (None, "text", 2),
        ("now", "late", 2),
        ("lease", "x", 2),
        ("tokens/day", b"short", 1),
        ("tokens/day", b"\xff" * 32, 1),
        ("lost:tokens/day", b"x", 1),
    ],
    ids=["no hash", "no time", "no lease", "another length", "no number", "what was lost"],
)
async def test_damaged_budgets_are_told_and_the_others_shown(
    reader: UsageReader,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    field: str | None,
    value: str | bytes,
    num_damaged: int,
) -> None:
    tell.cache_clear()
    with Redis.from_url(redis_url) as client:
        if field is None:
            client.set("sluice:{acme}", value)
        else:
            client.hset("sluice:{acme}", field, value)
    told = await reader.budgets()
    rows = {row["key"] or row["tenant"] or row["team"]: (row["left"], row["damaged"]) for row in told["budgets"]}
    assert rows == {
        "research": (12.5, False),
        "acme": (None, True),
        "k2": (5, False) if num_damaged == 1 else (None, True),
    }
    assert told["damaged"] == num_damaged and "the stored value sluice:{acme} is damaged" in caplog.text


async def test_every_grouping_sums_up_to_the_ledger(reader: UsageReader, redis_url: str) -> None:
    users = [("k1", "m", "batch", "ada", "search"), ("k1", "m", "batch", "bob", "chat"), ("k2", "n", "batch", "", "")]
    async with ledger(redis_url) as store:
        for key, model, service_class, user, project in users:
            tags = (("project", project),) if project else ()
            store.book("acme", key, Usage(1000, 10), row_name(UsageRow(key, model, service_class, user, tags), 2))
        store.book("beta", "k3", Usage(3, 1), row_name(UsageRow("k3", "m", "batch", "ada", ((SESSION, "s1"),)), 500))
        store.book("acme", "k1", Usage(7, 0), row_name(UsageRow("k1", "m", "batch", "carol"), 2))  # is full
    told = {}
    for by in ("tenant", "team", "key", "model", "class", "user", "session", "metadata.project", "tag.project"):
        report = await reader.report({"by": by, **DAYS})
        assert sum(row["input_tokens"] for row in report["rows"]) == report["total"]["input_tokens"] == 3010
        told[by] = {(row["tenant"], row["value"]): row["input_tokens"] for row in report["rows"]}
        assert (await reader.csv({"by": by, **DAYS})).startswith(
            "day,tenant,requests" if by == "tenant" else f"day,tenant,{by}"
        )
    assert told["team"] == {(None, "research"): 3007, (None, ""): 3}
    assert told["model"] == {(None, "m"): 2010, (None, "n"): 1000}
    assert told["class"] == {(None, "batch"): 3010}
    rest = ("acme", None)
    assert told["user"] == {
        ("acme", "ada"): 1000,
        ("acme", "bob"): 1000,
        ("acme", ""): 1000,
        ("beta", "ada"): 3,
        rest: 7,
    }
    assert told["session"] == {("acme", ""): 3000, ("beta", "s1"): 3, rest: 7}
    assert told["tag.project"] == {("acme", "search"): 2007, ("acme", ""): 1000, ("beta", ""): 3}


@asynccontextmanager
async def ledger(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore.at(url, 5.0)
    await store.connect()
    yield store
    await store.heartbeat()
    await store.close()


async def test_no_ledger_is_summed_up_on_the_event_loop(
    spent: None, reader: UsageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, part = set[int](), UsageRow.part

    def noted(row: UsageRow, by: str) -> str:
        threads.add(get_ident())
        return part(row, by)

    monkeypatch.setattr(UsageRow, "part", noted)
    await reader.report({"by": "user"})
    await reader.csv({"by": "user"})
    assert threads and get_ident() not in threads


@pytest.mark.parametrize("read", [UsageReader.csv, UsageReader.report])
async def test_the_garbage_of_many_ledgers_is_collected_in_portions(
    reader: UsageReader, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    """A collection stops all threads for as long as there are objects."""
    words = [b"1 k1", ENTRY.pack((TODAY - EPOCH).days, 1, 1, 0, 1, 0, 0, 0)]

    async def ledgers(*_: object) -> list[Ledger]:
        return [(f"t{number}", TODAY.replace(day=1)) for number in range(4000)]

    async def read_some(_: UsageLedger, some: list[Ledger]) -> list[LedgerRows]:
        numbers.append(gc.get_count()[0])
        return [LedgerRows(*ledger, words) for ledger in some]

    monkeypatch.setattr(UsageLedger, "ledgers", ledgers)
    monkeypatch.setattr(UsageLedger, "read", read_some)
    numbers, thresholds = list[int](), gc.get_threshold()
    gc.collect()
    gc.set_threshold(10**6)
    try:
        await read(reader, {"from": str(TODAY)})
    finally:
        gc.set_threshold(*thresholds)
    assert max(numbers) < 10_000
