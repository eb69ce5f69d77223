"""Uploads and lists of files, without a server."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from gateway.api.refusals import refusal_of
from gateway.batches.endpoints import (
    BatchEndpoint,
    BatchesEndpoint,
    FileEndpoint,
    FilesEndpoint,
    _page,
    _seconds,
    _Upload,
)
from gateway.batches.file_bytes import FileBytes
from gateway.batches.multipart import FormPart
from gateway.batches.objects import MAX_EXPIRY_S, file_object, new_id, sealed_record
from gateway.batches.records import BatchRecords
from gateway.errors import BadRequest, FilesUnavailable, QuotaUnverifiable, StoredFileNotFound, Unsatisfiable
from gateway.tenants.sealer import Sealer
from quotas.errors import QuotaError, StoreFault
from tests.quotas.servers import connected

SEALER = Sealer([b"secret"])


@pytest.mark.parametrize("limit", ["0000019999999", "000100", "1" * 5000, "\u0661", "-1", ""])
def test_a_limit_beyond_its_bounds_is_refused_however_it_is_written(limit: str) -> None:
    call: Any = SimpleNamespace(scope={"query_string": f"limit={limit}".encode()})
    with pytest.raises(BadRequest, match="limit must be"):
        _page(call)


@pytest.mark.parametrize("seconds", ["000003600" + "0" * 400, f"{MAX_EXPIRY_S + 1}", "9" * 5000, "3599"])
def test_an_expiry_beyond_its_bounds_is_refused_however_it_is_written(seconds: str) -> None:
    with pytest.raises(BadRequest, match="must be 3600 to"):
        _seconds({"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds})
    assert _seconds({"expires_after[anchor]": "created_at", "expires_after[seconds]": f"{MAX_EXPIRY_S}"})


async def test_a_page_of_one_purpose_is_not_cut_short_by_files_of_others() -> None:
    stored = []
    for n in range(250):  # the newest first
        name, purpose = new_id("file-"), "batch" if n >= 248 else "batch_output"
        record = file_object(name, 1, f"{n}", purpose, time.time() + 60)
        stored.append((name, sealed_record(SEALER, "t", name, record)))
    names = [name for name, _ in stored]

    async def ask(what: str, tenant: str, after: str | None, most: int) -> Any:
        first = 0 if after is None else names.index(after) + 1
        return stored[first : first + most]

    endpoint: Any = FilesEndpoint(SimpleNamespace(sealer=SEALER))  # type: ignore[arg-type]
    endpoint.ask = ask
    scope = {"method": "GET", "query_string": b"purpose=batch&limit=1"}
    page = await endpoint.told(SimpleNamespace(scope=scope), SimpleNamespace(name="t"))
    assert [one["filename"] for one in page["data"]] == ["248"] and page["has_more"]
    scope["query_string"] = b"limit=1&purpose=batch&after=" + page["last_id"].encode()
    page = await endpoint.told(SimpleNamespace(scope=scope), SimpleNamespace(name="t"))
    assert [one["filename"] for one in page["data"]] == ["249"] and not page["has_more"]


async def test_a_damaged_batch_or_file_is_told_and_left_out_of_a_list_and_has_an_error_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = new_id("file-")
    names = [new_id("batch_") for _ in range(3)]
    fields = {"record": "=damaged", "status": "validating", "created_at": "1", "expires_at": "2"}
    batches = dict(zip(names, [fields, fields | {"completed_at": "soon"}, fields | {"total": "x"}], strict=True))

    async def ask(what: str, tenant: str, *told: Any) -> Any:
        match what:
            case "batches":
                return list(batches.items()) if told[0] is None else []
            case "batch":
                return batches[told[0]]
        return [(file, "=damaged")] if told[0] is None else []

    for path, endpoint in (("files", FilesEndpoint), ("batches", BatchesEndpoint)) * 2:
        listing: Any = endpoint(SimpleNamespace(sealer=SEALER))  # type: ignore[arg-type]
        listing.ask = ask
        call = SimpleNamespace(scope={"method": "GET", "query_string": b""})
        page = await listing.told(call, SimpleNamespace(name="t"))
        assert [one["id"] for one in page["data"]] == (names[:1] if path == "batches" else [])
    assert [sum(name in line for line in caplog.messages) for name in (file, *names)] == [1, 0, 1, 1], "each once"
    one: Any = BatchEndpoint(SimpleNamespace(sealer=SEALER))  # type: ignore[arg-type]
    one.ask = ask
    with pytest.raises(StoreFault, match=f"{names[1]} is damaged"):
        await one.told(SimpleNamespace(scope={"path_params": {"batch_id": names[1]}}), SimpleNamespace(name="t"))


def new_upload(files: FileBytes, left: int) -> _Upload:
    async def offload(tenant: str, size: int, function: Callable[[], object]) -> None:
        await asyncio.to_thread(function)

    limits = SimpleNamespace(batches=SimpleNamespace(file_bytes=left))
    frontend: Any = SimpleNamespace(files=files, body_reader=SimpleNamespace(offload=offload))
    policy: Any = SimpleNamespace(name="t", tenant=limits)
    return _Upload(SimpleNamespace(frontend=frontend), policy, left)  # type: ignore[arg-type]


async def chunks(*given: bytes) -> AsyncIterator[bytes]:
    for one in given:
        yield one


async def test_an_upload_waits_for_the_disk_on_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: threads.append(threading.get_ident()))
    upload = new_upload(files := FileBytes(tmp_path, SEALER), 100)
    await upload.take(FormPart("file", "f", chunks(b"{}")))
    assert files.read("t", upload.name) == b"{}" and threads and threading.get_ident() not in threads


async def test_an_upload_that_the_disk_neither_keeps_nor_deletes_is_unavailable(tmp_path: Path) -> None:
    upload: Any = new_upload(FileBytes(tmp_path, SEALER), 100)
    upload._policy.name = "t" * 300  # longer than a file's name may be
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body}

    async def ask(what: str, tenant: str) -> int:
        return 0

    endpoint: Any = FilesEndpoint(upload._frontend)
    endpoint.ask = ask
    response = SimpleNamespace(request_headers={b"content-type": b"multipart/form-data; boundary=b"})
    scope = {"type": "http", "method": "POST", "headers": []}
    call: Any = SimpleNamespace(scope=scope, receive=receive, response=response, record=SimpleNamespace())
    with pytest.raises(FilesUnavailable):
        await endpoint.told(call, upload._policy)


async def test_uploads_at_once_are_together_within_the_bytes_of_their_tenant(tmp_path: Path) -> None:
    files = FileBytes(tmp_path, SEALER)
    first, second = new_upload(files, 100), new_upload(files, 100)
    await first.take(FormPart("file", "f", chunks(b"x" * 60)))
    with pytest.raises(Unsatisfiable, match=r"batches\.file_bytes"):
        await second.take(FormPart("file", "f", chunks(b"x" * 30, b"x" * 30)))
    assert files.uploaded["t"] == first.size + second.size == 90
    assert [name for name, _ in files.entries("t")] == [first.name]


class Stored:
    """The files and batches of tenant `t` in a store, and the endpoints that answer about them."""

    def __init__(self, records: BatchRecords, files: FileBytes) -> None:
        self.records, self.files = records, files

    async def ask(self, what: str, *told: Any) -> Any:
        try:
            return await self.records.call(what, *told)
        except QuotaError as error:
            raise refusal_of(error) from None

    async def told(self, kind: type[Any], method: str = "GET", query: str = "", **path_params: str) -> Any:
        endpoint = kind(SimpleNamespace(sealer=SEALER, files=self.files))
        endpoint.ask = self.ask
        scope = {"method": method, "query_string": query.encode(), "path_params": path_params}
        return await endpoint.told(SimpleNamespace(scope=scope), SimpleNamespace(name="t"))

    async def upload(self) -> str:
        name = new_id("file-")
        self.files.write("t", name, b"{}")
        record = sealed_record(SEALER, "t", name, file_object(name, 2, "f", "batch", time.time() + 60))
        assert await self.ask("put_file", "t", name, 2, time.time() + 60, record, 2**40)
        return name

    async def open(self, file: str) -> str:
        name = new_id("batch_")
        record = sealed_record(SEALER, "t", name, {"input_file_id": file})
        fields = {"record": record, "status": "validating", "created_at": "1", "expires_at": "2"}
        assert await self.ask("open", "t", name, fields, 99)
        return name


@pytest.fixture
async def stored(redis_url: str, tmp_path: Path) -> AsyncIterator[Stored]:
    async with connected(redis_url) as store:
        yield Stored(BatchRecords(store.batches()), FileBytes(tmp_path, SEALER))


async def test_a_damaged_open_batch_keeps_no_file_from_being_deleted(stored: Stored, redis_url: str) -> None:
    needed, other = await stored.upload(), await stored.upload()
    damaged, sound = await stored.open(needed), await stored.open(needed)
    with Redis.from_url(redis_url) as client:
        client.delete(f"sluice:{{t}}:batch:{damaged}")
        client.set(f"sluice:{{t}}:batch:{damaged}", "text")
        client.hset(f"sluice:{{t}}:batch:{sound}", "completed_at", "soon")
    assert (await stored.told(FileEndpoint, "DELETE", file_id=other))["deleted"]
    with pytest.raises(BadRequest, match=f"the input of {sound}"):
        await stored.told(FileEndpoint, "DELETE", file_id=needed)


async def test_the_input_of_an_open_batch_outlives_a_store_that_may_not_be_read(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = await stored.upload()
    await stored.open(needed)
    client: Any = stored.records.store._runner.client

    async def refuse(packed: object) -> Any:
        raise StoreFault("NOPERM")

    monkeypatch.setattr(client, "send_all", refuse)
    with pytest.raises(QuotaUnverifiable):
        await stored.told(FileEndpoint, "DELETE", file_id=needed)
    assert stored.files.has("t", needed)


async def test_batches_that_are_damaged_or_gone_end_no_list(
    stored: Stored, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = [await stored.open(new_id("file-")) for _ in range(7)]
    with Redis.from_url(redis_url) as client:
        for gone in made[1:3]:
            client.delete(f"sluice:{{t}}:batch:{gone}")
        client.set(f"sluice:{{t}}:batch:{made[1]}", "text")
        client.hset(f"sluice:{{t}}:batch:{made[3]}", "completed_at", "soon")
        client.hdel(f"sluice:{{t}}:batch:{made[5]}", "status")
        pages, after = list[list[str]](), ""
        for _ in range(9):
            page = await stored.told(BatchesEndpoint, query=f"limit=1{after}")
            pages.append([one["id"] for one in page["data"]])
            after = f"&after={page['last_id']}"
            if not page["has_more"]:
                break
        assert pages == [[made[6]], [made[4]], [made[0]]]
        told = [sum(name in line for line in caplog.messages) for name in made]
        assert told == [0, 1, 0, 1, 0, 1, 0], "each once"
        assert len((await stored.told(BatchesEndpoint))["data"]) == 3
        assert client.zcard("sluice:{t}:batches") == 6, "without the one that is gone"
        later = await stored.open(new_id("file-"))
        assert (await stored.told(BatchesEndpoint))["first_id"] == later, "a damaged one keeps none from being opened"


async def test_a_file_whose_record_is_damaged_can_be_deleted(stored: Stored, redis_url: str) -> None:
    file, odd = await stored.upload(), await stored.upload()
    with Redis.from_url(redis_url) as client:
        client.hset("sluice:{t}:files", mapping={file: "no record", odd: "4096 soon -"})
    for name in (file, odd):
        with pytest.raises(StoredFileNotFound):
            await stored.told(FileEndpoint, file_id=name)
        assert (await stored.told(FileEndpoint, "DELETE", file_id=name))["deleted"]
        assert not stored.files.has("t", name) and await stored.ask("file", "t", name) is None
        with pytest.raises(StoredFileNotFound):
            await stored.told(FileEndpoint, "DELETE", file_id=name)
    with pytest.raises(StoredFileNotFound):
        await stored.told(FileEndpoint, "DELETE", file_id="../t-u/file-1")


async def test_damaged_bytes_of_all_files_are_a_fault_of_the_store(stored: Stored, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.hset("sluice:{t}:files", "", "many")
    with pytest.raises(QuotaUnverifiable):
        await stored.ask("file_bytes", "t")
