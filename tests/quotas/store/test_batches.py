"""Batches in the store: one holder at a time, each line settled once, files within their tenant's bytes."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from quotas.errors import StoreFault
from quotas.policy.limit import EPOCH, Budget, BudgetPeriod, Limit, Rate, Resource, TokenPrices
from quotas.reservation import Usage
from quotas.store.batches import LEAST_FILE_BYTES, SCANNED, DoneLine, FinishedLine
from quotas.store.redis_store import RedisStore
from tests.quotas.stores import usage_by_key

FIELDS = {"record": "sealed", "status": "validating", "created_at": "1"}
USED = Usage(input_tokens=7, output_tokens=5, cached_tokens=3, kv_byte_seconds=2.0, reasoning_tokens=1)
LIMITS = (Limit(Resource.TOKENS, 1000, Rate(60, 1000)),)


async def test_one_replica_at_a_time_has_a_batch_and_a_former_holder_changes_nothing(
    store: RedisStore, other: RedisStore, tenant: str
) -> None:
    mine, theirs = store.batches(), other.batches()
    assert await mine.open(tenant, "b", FIELDS, 1) and not await mine.open(tenant, "c", FIELDS, 1)
    assert (tenant, "b") in await theirs.open_batches()
    assert await mine.claim(tenant, "b") == 1 and await theirs.claim(tenant, "b") == 0
    assert await mine.update(tenant, "b", {}, epoch=1, is_given_back=True)
    assert await theirs.claim(tenant, "b") == 2, "given back"
    line = FinishedLine("b", 1, 0, True)
    assert not await store.finish_line(tenant, "k", LIMITS, line, USED), "of a former epoch"
    assert not await mine.update(tenant, "b", {"status": "completed"}, epoch=1)
    assert await theirs.update(tenant, "b", {"status": "cancelling"}, statuses=("validating", "in_progress"))
    assert not await theirs.update(tenant, "b", {"status": "x"}, statuses=("validating",))
    assert await theirs.update(tenant, "b", {"status": "cancelled"}, epoch=2, kept=60.0)
    assert (tenant, "b") not in await mine.open_batches()
    assert (await mine.batch(tenant, "b") or {})["status"] == "cancelled"
    assert await mine.batch(f"{tenant}-2", "b") is None


async def test_a_line_is_settled_once_however_often_and_by_whom_it_is_told(
    store: RedisStore, other: RedisStore, tenant: str
) -> None:
    batches = store.batches()
    await batches.open(tenant, "b", FIELDS, 1)
    epoch = await batches.claim(tenant, "b")
    for limits in (LIMITS, ()):
        for number in range(2):
            told = FinishedLine("b", epoch, number + 2 * len(limits), number == 0)
            calls = [one.finish_line(tenant, "k", limits, told, USED) for one in (store, other, store)]
            assert all(await asyncio.gather(*calls))
    assert {n: one.is_completed for n, one in (await batches.done_lines(tenant, "b")).items()} == {
        0: True, 1: False, 2: True, 3: False,
    }  # fmt: skip
    fields = await batches.batch(tenant, "b") or {}
    assert [fields[name] for name in ("completed", "failed", "input_tokens", "output_tokens")] == ["2", "2", "28", "20"]
    assert fields["reasoning_tokens"] == "4" and fields["cached_tokens"] == "12"
    (state,) = await store.states(tenant, "k", LIMITS)
    assert 1000 - 2 * 12 <= state.remaining <= 1000 - 2 * 12 + 2, "of the lines that the limit counts, each once"


async def test_a_line_costs_the_price_of_batches_and_its_result_counts_among_the_files(
    store: RedisStore, tenant: str
) -> None:
    batches, today = store.batches(), datetime.now(UTC).date()
    await batches.open(tenant, "b", FIELDS, 1)
    epoch = await batches.claim(tenant, "b")
    prices, in_batches = TokenPrices(100, 50, 400, 400, "EUR"), TokenPrices(25, 12, 100, 90, "EUR")
    cost = Limit(Resource.COST, 10_000, Budget(BudgetPeriod.DAY), None, prices)
    line = FinishedLine("b", epoch, 0, True, result_bytes=900, prices=in_batches)
    assert await store.finish_line(tenant, "k", (cost,), line, USED)
    (state,) = await store.states(tenant, "k", (cost,))
    assert state.remaining == 10_000 - (4 * 25 + 3 * 12 + 4 * 100 + 90)
    used = USED._replace(batch_input_tokens=7, batch_output_tokens=5, batch_cached_tokens=3, batch_reasoning_tokens=1)
    assert await usage_by_key(store, tenant, today) == {"k": used}
    assert await batches.file_bytes(tenant) == 900
    assert await batches.put_results(tenant, "f", 900, 2e9, "r", "b", epoch)
    assert not await batches.put_results(tenant, "g", 900, 2e9, "r", "b", epoch - 1), "of a former holder"
    assert await batches.update(tenant, "b", {"status": "completed"}, epoch=epoch, kept=60.0)
    assert await batches.file_bytes(tenant) == LEAST_FILE_BYTES


@pytest.mark.parametrize("damaged", ["ledger", "files"])
async def test_a_line_is_charged_beside_what_is_no_hash(store: RedisStore, tenant: str, damaged: str) -> None:
    batches, month = store.batches(), datetime.now(UTC).date().replace(day=1)
    await batches.open(tenant, "b", FIELDS, 1)
    epoch = await batches.claim(tenant, "b")
    place = f"ledger:{(month - EPOCH).days}" if damaged == "ledger" else damaged
    await batches._execute(b"SET", batches._of(tenant, place), b"text")
    budget = (Limit(Resource.TOKENS, 1000, Budget(BudgetPeriod.DAY)),)
    for _ in range(2):
        assert await store.finish_line(tenant, "k", budget, FinishedLine("b", epoch, 0, True, result_bytes=9), USED)
    assert [one.remaining for one in await store.states(tenant, "k", budget)] == [1000 - 12]
    assert await batches.update(tenant, "b", {"status": "completed"}, epoch=epoch, kept=60.0)
    assert await batches._execute(b"PTTL", batches._batch_key(tenant, "b")) > 0, "it is not kept for ever"


async def test_a_file_that_cannot_be_listed_leaves_nothing(store: RedisStore, tenant: str) -> None:
    files = store.batches()
    await files._execute(b"SET", files._of(tenant, "files:order"), b"text")
    with pytest.raises(StoreFault):
        await files.put_file(tenant, "f", 9, 2e9, "record", 2**30)
    assert await files.file(tenant, "f") is None and await files.file_bytes(tenant) == 0


async def test_the_done_lines_of_a_large_batch_come_in_parts(
    store: RedisStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, client, parts = store.batches(), store.batches()._runner.client, list[int]()
    words = [word for n in range(5000) for word in (b"%d" % n, b"2 completed")]
    await client.execute(b"HSET", batches._batch_key(tenant, "b") + b":lines", *words)
    execute = client.execute

    async def counted(*command: bytes) -> Any:
        said = await execute(*command)
        parts.append(len(said[-1]))
        return said

    monkeypatch.setattr(client, "execute", counted)
    assert await batches.done_lines(tenant, "b") == dict.fromkeys(range(5000), DoneLine(2, True))
    assert max(parts) < 4 * SCANNED


async def test_the_list_of_batches_forgets_those_whose_time_is_over(store: RedisStore, tenant: str) -> None:
    batches = store.batches()
    for name in "abc":
        await batches.open(tenant, name, FIELDS, 9)
    for name in "ab":
        await batches._execute(b"DEL", batches._batch_key(tenant, name))
    await batches.open(tenant, "d", FIELDS, 9)
    assert await batches._execute(b"ZRANGE", batches._of(tenant, "batches"), 0, -1) == [b"c", b"d"]


async def test_an_old_batch_that_is_no_hash_keeps_no_other_from_being_opened(store: RedisStore, tenant: str) -> None:
    """What a script has written stays when it fails: each try would leave a batch that is computed and charged."""
    batches = store.batches()
    await batches.open(tenant, "a", FIELDS, 9)
    await batches._execute(b"SET", batches._batch_key(tenant, "a"), b"text")
    assert await batches.open(tenant, "b", FIELDS, 9)
    listed = await batches._execute(b"ZRANGE", batches._of(tenant, "batches"), 0, -1)
    assert sorted(listed) == [b"a", b"b"], "a damaged one is listed, and told of"


async def test_a_batch_that_cannot_be_listed_leaves_nothing(store: RedisStore, tenant: str) -> None:
    batches = store.batches()
    await batches._execute(b"SET", batches._of(tenant, "batches"), b"text")
    with pytest.raises(StoreFault):
        await batches.open(tenant, "a", FIELDS, 9)
    assert await batches.batch(tenant, "a") is None


async def test_batches_that_have_ended_make_room_for_others_and_open_ones_do_not(
    store: RedisStore, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may have any number of batches fail at once, and each has a record of kilobytes."""
    monkeypatch.setattr("quotas.store.batches.MAX_KEPT_BATCHES", 5)
    batches = store.batches()
    for name in ("open", "ended", *map(str, range(20))):
        assert await batches.open(tenant, name, FIELDS, 2)
        if name != "open":
            assert await batches.update(tenant, name, {"status": "failed"}, kept=60.0)
    kept = [name for name, _ in await batches.batches(tenant, None, 100)]
    assert kept == ["19", "18", "17", "16", "open"]
    assert await batches.batch(tenant, "ended") is None and await batches.batch(tenant, "open")


async def test_files_are_within_the_bytes_of_their_tenant(store: RedisStore, tenant: str) -> None:
    files = store.batches()
    most = 10 * LEAST_FILE_BYTES
    assert await files.put_file(tenant, "f", most - LEAST_FILE_BYTES, 2e9, "record f", most)
    assert not await files.put_file(tenant, "g", LEAST_FILE_BYTES + 1, 2e9, "record g", most)
    assert await files.put_file(tenant, "f", most - LEAST_FILE_BYTES, 2e9, "anew", most), "in place of itself"
    assert await files.put_file(tenant, "g", 1, 1.5, "record g", most), "a small file counts as one of the least"
    assert not await files.put_file(tenant, "h", 1, 2e9, "record h", most)
    assert await files.file_bytes(tenant) == most
    assert [name for name, _ in await files.files(tenant, None, 9)] == ["g", "f"]
    assert await files.files(tenant, "g", 9) == [("f", "anew")]
    assert await files.expiries(tenant) == {"f": 2e9, "g": 1.5}
    assert await files.file(f"{tenant}-2", "f") is None and await files.file(tenant, "") is None
    assert await files.delete_file(tenant, "f") and not await files.delete_file(tenant, "f")
    assert not await files.delete_file(tenant, "") and await files.file_bytes(tenant) == LEAST_FILE_BYTES
