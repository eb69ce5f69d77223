"""Runs of batches against a store and a disk that lose and repeat: each batch ends, and as what it is."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from redis import Redis

from gateway.batches import runner
from gateway.batches.file_bytes import FileBytes
from gateway.batches.line_endpoints import LineAnswer
from gateway.batches.lines import Checked, problem_object
from gateway.batches.objects import new_id, sealed_record
from gateway.batches.runner import OVERDUE_SECONDS, BatchRunner, RunnerParts
from gateway.telemetry.metrics.batches import BatchCounts
from gateway.tenants.sealer import Sealer
from quotas.errors import StoreFault, StoreUnavailable
from quotas.policy.policy import BatchLimits
from quotas.reservation import NOTHING
from quotas.store.batches import LEAST_FILE_BYTES
from tests.quotas.servers import connected

CHAT = "/v1/chat/completions"
POLICY: Any = SimpleNamespace(tenant=SimpleNamespace(batches=BatchLimits(), price=None), charged=())


class Endpoints:
    """Answers each line at once, after `meanwhile`."""

    async def meanwhile(self) -> None:
        pass

    async def answer(self, path: str, tenant: str, key: str, body: bytes) -> LineAnswer:
        await self.meanwhile()
        return LineAnswer(200, {"echo": orjson.loads(body)}, "req", NOTHING, None)


class Site:
    """A runner, and what its tenant `t` has."""

    def __init__(self, parts: RunnerParts, endpoints: Endpoints) -> None:
        self.parts, self.endpoints, self.store, self.files = parts, endpoints, parts.store, parts.files
        self.runner = BatchRunner(parts, BatchCounts())

    async def upload(self, count: int = 2, expires: float = 2e9) -> str:
        name = new_id("file-")
        body = {"model": "m", "messages": []}
        lines = [{"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": body} for n in range(count)]
        text = b"\n".join(map(orjson.dumps, lines))
        self.files.write("t", name, text)
        assert await self.store.put_file("t", name, len(text), expires, "-", 2**40)
        return name

    async def open(self, file: str, expires_in: float = 60, **fields: str) -> str:
        name = new_id("batch_")
        asked = {"input_file_id": file, "endpoint": CHAT, "output_seconds": None, "key": "k"}
        record = sealed_record(self.files.sealer, "t", name, asked)
        times = {"created_at": "1", "expires_at": f"{int(time.time() + expires_in)}"}
        assert await self.store.open("t", name, {"record": record, "status": "validating"} | times | fields, 9)
        return name

    async def ended(self, *names: str) -> dict[str, str]:
        """Run until the batches have ended; returns the last one's fields."""
        running = asyncio.create_task(self.runner.run())
        try:
            async with asyncio.timeout(240):
                while not {*names}.isdisjoint([*await self.store.open_of("t"), *self.runner.running]):
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.wait([running])
        return await self.store.batch("t", names[-1]) or {}

    def codes(self, fields: Mapping[str, str]) -> list[str]:
        text = self.files.read("t", fields["error_file_id"]) if "error_file_id" in fields else b""
        return [orjson.loads(one)["error"]["code"] for one in text.splitlines()]


@pytest.fixture
async def site(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    endpoints: Any = Endpoints()
    async with connected(redis_url) as store:
        parts = RunnerParts(
            store=store.batches(),
            quotas=SimpleNamespace(store=store),  # type: ignore[arg-type]
            files=FileBytes(tmp_path, Sealer([b"secret"])),
            endpoints=endpoints,
            policy=lambda tenant, key: POLICY,
            models=lambda endpoint, policy: frozenset({"m"}),
            most_line_bytes=2**20,
            width=4,
            runs_others=lambda: False,
        )
        yield Site(parts, endpoints)


async def test_the_input_of_an_open_batch_outlives_its_time(site: Site) -> None:
    name = await site.open(await site.upload(expires=1.0))
    await site.runner._sweep()
    fields = await site.ended(name)
    assert (fields["status"], fields["completed"]) == ("completed", "2")
    site.runner._swept = -1e9
    await site.runner._sweep()
    assert list(await site.store.expiries("t")) == [fields["output_file_id"]], "and no longer"


async def test_each_line_is_begun_in_a_turn_of_its_own(site: Site) -> None:
    looks = list[bool]()
    site.runner.parts = replace(site.parts, runs_others=lambda: looks.append(site.runner._turns.locked()) or False)
    name = await site.open(await site.upload(3))
    assert (await site.ended(name))["completed"] == "3"
    assert looks == [True] * 3


async def test_a_batch_whose_input_no_replica_has_ends_once_it_is_overdue(site: Site) -> None:
    elsewhere = await site.upload()
    site.files.delete("t", elsewhere)
    late = await site.open(elsewhere, -OVERDUE_SECONDS - 9)
    foreign = await site.open(elsewhere)
    fields = await site.ended(late)
    assert fields["status"] == "failed" and "errors" in fields
    assert await site.store.open_of("t") == [foreign], "another replica may have it"


async def test_a_batch_whose_input_was_deleted_as_it_was_opened_ends_at_once(site: Site) -> None:
    assert (await site.ended(await site.open(new_id("file-"))))["status"] == "failed"


async def test_a_batch_whose_secret_was_removed_ends_once_it_is_overdue(site: Site) -> None:
    name = await site.open(await site.upload(), -OVERDUE_SECONDS - 9, record="AAAA")
    assert (await site.ended(name))["status"] == "failed"


async def test_a_damaged_batch_is_told_and_others_are_computed(
    site: Site, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [await site.open(await site.upload()) for _ in range(3)]
    with Redis.from_url(redis_url) as client:
        client.delete(f"sluice:{{t}}:batch:{names[0]}")
        client.set(f"sluice:{{t}}:batch:{names[0]}", "text")
        client.hdel(f"sluice:{{t}}:batch:{names[1]}", "status")
        client.hset("sluice:{t}:files", "file-x", "no record")
        client.zadd("sluice:{t}:files:order", {"file-x": 1})
    await site.runner._sweep()
    assert (await site.ended(names[2]))["status"] == "completed"
    assert all(f"the stored value {name} is damaged" in caplog.text for name in names[:2])
    assert [name for name, one in await site.store.batches("t", None, 9) if one] == names[2:]
    assert dict(await site.store.files("t", None, 9))["file-x"] == ""
    with pytest.raises(StoreFault, match="answered with an error: WRONGTYPE"):
        await site.store.batch("t", names[0])


async def test_an_ended_batch_that_changes_as_it_is_looked_at_is_not_damaged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    name = await site.open(await site.upload(), status="completed")
    read = site.store.batch

    async def changed(tenant: str, batch: str) -> Any:
        fields = await read(tenant, batch)
        site.runner.look(batch)
        return fields

    site.store.batch = changed  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        await site.runner._take(group)
    assert "damaged" not in caplog.text and not await site.store.unclaimed() and name not in site.runner.running


async def test_a_batch_that_an_outage_hid_is_looked_at_once_the_store_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await site.open(await site.upload())

    async def away(*told: object) -> Any:
        raise StoreUnavailable("away")

    async with asyncio.TaskGroup() as group:
        with monkeypatch.context() as patch:
            patch.setattr(site.store, "batch", away)
            with pytest.raises(StoreUnavailable):
                await site.runner._take(group)
        await site.runner._take(group)
        assert name in site.runner.running


async def test_damaged_files_of_one_tenant_keep_no_others_from_being_swept(
    site: Site, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = dict[str, str]()
    for tenant in ("t", "u", "v"):
        kept[tenant] = name = new_id("file-")
        site.files.write(tenant, name, b"{}")
        assert await site.store.put_file(tenant, name, 2, 1.0, "-", 2**40)
    tenants = site.files.tenants()
    with Redis.from_url(redis_url) as client:
        client.set(f"sluice:{{{tenants[0]}}}:files", "text")
    await site.runner._sweep()
    assert [site.files.has(tenant, kept[tenant]) for tenant in tenants] == [True, False, False]
    assert f"files of {tenants[0]} is damaged" in caplog.text


async def test_a_sweep_that_cannot_read_the_batches_deletes_no_input(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await site.upload(expires=1.0)
    await site.open(file)

    async def refuse(*packed: object) -> Any:
        raise StoreFault("NOPERM")

    with monkeypatch.context() as patch:
        patch.setattr(site.store._runner.client, "send_all", refuse)
        patch.setattr(site.store, "batch", refuse)
        with pytest.raises(StoreFault):
            await site.runner._sweep()
    assert site.files.has("t", file)


async def test_a_batch_ends_though_its_input_is_lost_while_it_runs(site: Site) -> None:
    file = await site.upload()

    async def lose() -> None:
        site.files.delete("t", file)

    site.endpoints.meanwhile = lose  # type: ignore[method-assign]
    assert (await site.ended(await site.open(file)))["status"] == "failed"


async def test_a_result_that_the_disk_has_lost_is_told_and_the_others_are_kept(site: Site) -> None:
    name = await site.open(await site.upload(3))
    epoch_of = site.store.done_lines

    async def lose(tenant: str, batch: str) -> Any:
        found = await epoch_of(tenant, batch)
        if len(found) == 3:
            site.files.path("t", f"{batch}/1.1").unlink(missing_ok=True)
        return found

    site.store.done_lines = lose  # type: ignore[method-assign]
    fields = await site.ended(name)
    assert fields["status"] == "completed" and site.codes(fields) == ["result_lost"]
    assert len(site.files.read("t", fields["output_file_id"]).splitlines()) == 2


async def test_a_holder_that_has_lost_its_lease_leaves_no_file_of_results(site: Site) -> None:
    name = await site.open(await site.upload())
    put, epochs = site.store.put_results, list[int]()

    async def late(tenant: str, file: str, size: int, expires: float, record: str, batch: str, epoch: int) -> bool:
        epochs.append(epoch)
        if len(epochs) == 1:  # its lease runs out before it has written, and another one takes the batch
            await site.store.update(tenant, batch, {"lease": "0"})
            assert await site.store.claim(tenant, batch) == 2
            await site.store.update(tenant, batch, {}, epoch=2, is_given_back=True)
        return await put(tenant, file, size, expires, record, batch, epoch)

    site.store.put_results = late  # type: ignore[method-assign]
    fields = await site.ended(name)
    assert fields["status"] == "completed" and epochs == [1, 3]
    results = [one for one in await site.store.expiries("t") if one.startswith(f"file-{name[6:-5]}")]
    assert results == [fields["output_file_id"]]


async def test_a_batch_whose_results_fill_the_tenants_bytes_keeps_what_is_done(site: Site) -> None:
    file = await site.upload(9)
    limits = BatchLimits(file_bytes=await site.store.file_bytes("t") + 300)
    policy: Any = SimpleNamespace(tenant=SimpleNamespace(batches=limits, price=None), charged=())
    site.runner.parts = replace(site.parts, policy=lambda tenant, key: policy, width=1)
    before = await site.store.file_bytes("t")
    fields = await site.ended(await site.open(file))
    codes = site.codes(fields)
    assert fields["status"] == "completed" and set(codes) == {"file_bytes_exceeded"}
    assert len(codes) + int(fields["completed"]) == 9 and 0 < int(fields["completed"]) < 4
    assert await site.store.file_bytes("t") == before + 2 * LEAST_FILE_BYTES, "of results, which are files now"


async def test_a_replica_with_nothing_to_do_reads_the_index_alone(site: Site) -> None:
    for _ in range(3):
        name = await site.open(await site.upload())
        assert await site.store.claim("t", name)
    client, asked = site.store._runner.client, list[bytes]()
    execute = client.execute

    async def noted(*command: bytes) -> Any:
        asked.append(command[0])
        return await execute(*command)

    client.execute = noted  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        await site.runner._take(group)
    assert asked == [b"ZRANGEBYSCORE"]
    assert ("t", name) in await site.store.open_batches()


async def test_a_completed_batch_is_completed_though_the_store_is_asked_twice(site: Site) -> None:
    name = await site.open(await site.upload())
    update, failed = site.store.update, []

    async def hiccup(tenant: str, batch: str, fields: Mapping[str, str], **how: Any) -> bool:
        done = await update(tenant, batch, fields, **how)
        if fields.get("status") == "finalizing" and not failed:
            failed.append(done)
            raise StoreUnavailable("the answer was lost")
        return done

    site.store.update = hiccup  # type: ignore[method-assign]
    assert (await site.ended(name))["status"] == "completed" and failed == [True]


async def test_a_batch_whose_lease_was_lost_for_a_while_has_not_expired(site: Site) -> None:
    name = await site.open(await site.upload(1))
    site.store.lease = 0.0
    update, said = site.store.update, []

    async def lapse(tenant: str, batch: str, fields: Mapping[str, str], **how: Any) -> bool:
        if fields or how.get("is_given_back"):
            return await update(tenant, batch, fields, **how)
        said.append(len(said) > 0)
        return said[-1]

    async def slow() -> None:
        if len(said) > 1:
            return
        run = site.runner.running[name]
        try:
            run.changed.set()
            await asyncio.Event().wait()
        finally:
            while len(said) < 2:
                run.changed.set()
                await asyncio.sleep(0.001)

    site.store.update, site.endpoints.meanwhile = lapse, slow  # type: ignore[method-assign]
    assert (await site.ended(name))["status"] == "completed" and said[:2] == [False, True]


async def test_a_replica_with_a_lower_limit_goes_on_with_lines_that_another_has_checked(site: Site) -> None:
    name = await site.open(await site.upload(), status="in_progress", in_progress_at="1", total="2")
    site.runner.parts = replace(site.parts, most_line_bytes=20)
    fields = await site.ended(name)
    assert (fields["status"], fields["completed"]) == ("completed", "2")


async def test_the_batches_of_a_tenant_share_the_lines_that_one_may_have_in_memory(site: Site) -> None:
    batches = [await site.open(await site.upload(20)) for _ in range(4)]
    most, released = 0, asyncio.Event()

    def num_lines() -> int:
        return sum("_settle_line" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async def hold() -> None:
        nonlocal most
        most = max(most, num_lines())
        if len(site.runner.running) == len(batches):
            for _ in range(100):
                await asyncio.sleep(0)
            most = max(most, num_lines())
            released.set()
        await released.wait()

    site.endpoints.meanwhile = hold  # type: ignore[method-assign]
    assert (await site.ended(batches[0]))["status"] == "completed" and released.is_set()
    assert most <= 4 + 2 + 1 + 1


async def test_the_files_of_many_batches_are_checked_one_after_the_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks on several threads at once would leave the event loop a fraction of the interpreter."""
    running, most = 0, 0

    def check(lines: Any, endpoint: str, **bounds: Any) -> Checked:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        time.sleep(0.005)  # in which others might begin
        running -= 1
        return Checked(1, None, [problem_object("invalid", "It is.")])

    monkeypatch.setattr(runner, "check_lines", check)
    batches = [await site.open(await site.upload()) for _ in range(6)]
    assert (await site.ended(*batches))["status"] == "failed"
    assert most == 1
