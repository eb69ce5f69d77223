"""Answers /v1/files and /v1/batches. A call counts as a request and spends no tokens."""

import asyncio
import logging
import time
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any

from starlette.datastructures import QueryParams
from starlette.routing import Route

from admission.outcome import Outcome
from gateway.api.endpoint import Call, StoredEndpoint
from gateway.api.frontend import Frontend
from gateway.batches.multipart import FormPart, FormReader, boundary_of
from gateway.batches.objects import (
    BATCH,
    BATCH_ID,
    FILE_ID,
    MAX_EXPIRY_S,
    MAX_LISTED,
    MIN_EXPIRY_S,
    Fields,
    Json,
    batch_object,
    file_object,
    new_id,
    opened_record,
    sealed_record,
    window_seconds,
)
from gateway.errors import (
    BadRequest,
    BatchNotFound,
    FilesUnavailable,
    RequestTooLarge,
    StoredFileNotFound,
    Unsatisfiable,
)
from gateway.http.request_scope import BodyParts
from gateway.http.responses import encode_headers
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.damage import tell
from quotas.errors import StoreFault
from quotas.policy.units import show_size

log = logging.getLogger(__name__)

BODY_SECONDS = 60.0  # between two parts of an upload
MAX_FORM_BYTES = 2**16  # of an upload beside its file
MAX_FIELD_BYTES = 1024
PURPOSE = "batch"
FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class _StoreEndpoint(StoredEndpoint):
    """Asks the store of files and batches."""

    async def ask(self, what: str, *told: Any) -> Any:
        return await self.frontend.engine.batches(what, *told)

    async def file_record(self, tenant: str, name: str) -> Json:
        """Raises `StoredFileNotFound` alike for an unknown, a foreign and an expired file."""
        sealed = await self.ask("file", tenant, name) if FILE_ID.fullmatch(name) else None
        record = None if sealed is None else opened_record(self.frontend.sealer, tenant, name, sealed)
        if record is None or record["expires_at"] <= time.time():
            raise _no_file(name)
        return record

    async def batch_fields(self, tenant: str, name: str) -> Fields:
        """Raises `BatchNotFound` alike for an unknown, a foreign and an expired batch."""
        fields: Fields | None = await self.ask("batch", tenant, name) if BATCH_ID.fullmatch(name) else None
        if fields is None:
            raise BatchNotFound(f"There is no batch {name[:80]!r}: it was never created, or has expired.")
        return fields

    def shown(self, tenant: str, name: str, fields: Fields) -> Json:
        """Raises `StoreFault` for a damaged batch."""
        try:
            return batch_object(self.frontend.sealer, tenant, name, fields)
        except (KeyError, ValueError) as error:
            raise StoreFault(f"the batch {name} is damaged: {error!r}") from error


def _no_file(name: str) -> StoredFileNotFound:
    return StoredFileNotFound(f"There is no file {name[:80]!r}: it was never uploaded, was deleted, or has expired.")


def _page(call: Call) -> tuple[str | None, int]:
    """The id behind which a page begins, and the most of its entries. Raises `BadRequest`."""
    asked = QueryParams(call.scope["query_string"])
    limit = asked.get("limit", "20")
    most = _whole(limit, 1, MAX_LISTED)
    if most is None:
        raise BadRequest(f"limit must be 1 to {MAX_LISTED}, got {limit[:20]!r}.", "limit")
    after = asked.get("after")
    if after is not None and not (FILE_ID.fullmatch(after) or BATCH_ID.fullmatch(after)):
        raise BadRequest("after must be the id of the last entry of the page before.", "after")
    return after, most


def _whole(text: str, least: int, most: int) -> int | None:
    """The number that a text is; None if it is none, or beyond the bounds."""
    is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    return int(text) if is_short and least <= int(text) <= most else None


def _listed(entries: list[Json], limit: int) -> Json:
    page = entries[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(entries) > limit}


class FilesEndpoint(_StoreEndpoint):
    """Answers POST /v1/files, an upload, and GET with a page of the tenant's files."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        if call.scope["method"] == "POST":
            return await self._upload(call, policy)
        after, limit = _page(call)
        purpose = QueryParams(call.scope["query_string"]).get("purpose")
        found = list[Json]()
        while len(found) <= limit and (page := await self.ask("files", policy.name, after, MAX_LISTED)):
            for after, sealed in page:  # the next page is behind the last of these
                record = opened_record(self.frontend.sealer, policy.name, after, sealed)
                if record is None:
                    tell(after, "its record is damaged, or the secret that it was sealed with was removed")
                elif record["expires_at"] > time.time() and purpose in (None, record["purpose"]):
                    found.append(record)
        return _listed(found, limit)

    async def _upload(self, call: Call, policy: EffectivePolicy) -> Json:
        most = policy.tenant.batches.file_bytes
        left = max(0, most - await self.ask("file_bytes", policy.name))
        boundary = boundary_of(call.response.request_headers.get(b"content-type") or b"")
        try:
            parts = BodyParts(call.scope, call.receive, left + MAX_FORM_BYTES, BODY_SECONDS)
        except RequestTooLarge:
            raise _too_many_bytes(most, left) from None
        upload = _Upload(self, policy, left)
        try:
            async with aclosing(FormReader(boundary, parts).parts()) as form:
                async for part in form:
                    await upload.take(part)
            return await upload.record()
        except BaseException as error:
            with suppress(OSError):
                self.frontend.files.delete(policy.name, upload.name)
            if isinstance(error, RequestTooLarge):
                raise _too_many_bytes(most, left) from None
            if isinstance(error, OSError):
                log.error("an upload was not kept: %s", error)
                raise FilesUnavailable from None
            raise
        finally:
            self.frontend.files.uploaded[policy.name] -= upload.size
            call.record.body_bytes = parts.size


class _Upload:
    """The parts of one upload, as far as they have come."""

    def __init__(self, endpoint: _StoreEndpoint, policy: EffectivePolicy, left: int) -> None:
        """`left`: the bytes that the tenant's files may still have."""
        self.name = new_id("file-")
        self.size = 0  # bytes of its file, counted in `FileBytes.uploaded`
        self._endpoint, self._frontend, self._policy, self._left = endpoint, endpoint.frontend, policy, left
        self._filename: str | None = None
        self._fields: dict[str, str] = {}

    async def take(self, part: FormPart) -> None:
        """Read a part to its end. Raises `BadRequest` and `Unsatisfiable`."""
        if part.name in FORM_FIELDS:
            self._fields[part.name] = await part.text(MAX_FIELD_BYTES)
        elif part.name != "file":
            raise BadRequest(f"{part.name[:80]} is not a field: send {', '.join(FORM_FIELDS)}, file.", part.name)
        elif self._filename is not None:
            raise BadRequest("The form has two files: upload one at a time.", "file")
        else:
            self._filename = part.filename or "file"
            await self._write(part)

    async def _write(self, part: FormPart) -> None:
        tenant, offload = self._policy.name, self._frontend.body_reader.offload
        uploaded = self._frontend.files.uploaded
        with self._frontend.files.create(tenant, self.name) as writer:
            async for chunk in part.chunks:
                if uploaded[tenant] + len(chunk) > self._left:
                    raise _too_many_bytes(self._policy.tenant.batches.file_bytes, self._left)
                uploaded[tenant] += len(chunk)
                self.size += len(chunk)
                await offload(tenant, len(chunk), partial(writer.write, chunk))
            await asyncio.to_thread(writer.close)

    async def record(self) -> Json:
        """Keep the record of a file that has come whole, and return it. Raises `BadRequest` and `Unsatisfiable`."""
        purpose, bounds, tenant = self._fields.get("purpose"), self._policy.tenant.batches, self._policy.name
        if self._filename is None:
            raise BadRequest("The form has no part named file.", "file")
        if purpose != PURPOSE:
            raise BadRequest(f"purpose must be {PURPOSE!r}, the one use of files here, got {purpose!r}.", "purpose")
        if not self.size:
            raise BadRequest("The file is empty: it has one request a line.", "file")
        expires = time.time() + (_seconds(self._fields) or bounds.retention)
        record = file_object(self.name, self.size, self._filename, purpose, expires)
        sealed = sealed_record(self._frontend.sealer, tenant, self.name, record)
        put = self._endpoint.ask("put_file", tenant, self.name, self.size, expires, sealed, bounds.file_bytes)
        if not await put:
            raise _too_many_bytes(bounds.file_bytes, self._left)
        return record


def _seconds(life: dict[str, str]) -> int | None:
    if not any(name.startswith("expires_after") for name in life):
        return None
    seconds = _whole(life.get("expires_after[seconds]", ""), MIN_EXPIRY_S, MAX_EXPIRY_S)
    if life.get("expires_after[anchor]") != "created_at":
        raise BadRequest("expires_after[anchor] must be 'created_at'.", "expires_after")
    if seconds is None:
        told = f"expires_after[seconds] must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
        raise BadRequest(told, "expires_after")
    return seconds


def _too_many_bytes(most: int, left: int) -> Unsatisfiable:
    return Unsatisfiable(
        f"Your tenant's limit batches.file_bytes is {show_size(most)}, of which {left} bytes are left: delete "
        "files, upload a smaller one, or have the limit raised.",
        "file",
    )


class FileEndpoint(_StoreEndpoint):
    """Answers GET and DELETE of one file."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        tenant, name = policy.name, call.scope["path_params"]["file_id"]
        if call.scope["method"] == "GET":
            return await self.file_record(tenant, name)
        for batch, fields in await self.ask("read", tenant, await self.ask("open_of", tenant)):
            asked = fields and opened_record(self.frontend.sealer, tenant, batch, fields["record"])
            if asked and asked["input_file_id"] == name:
                raise BadRequest(f"The file is the input of {batch}, which has not ended: cancel it.", "file_id")
        # a damaged one, too, which nobody could remove otherwise
        if not (FILE_ID.fullmatch(name) and await self.ask("delete_file", tenant, name)):
            raise _no_file(name)
        await asyncio.to_thread(self.frontend.files.delete, tenant, name)
        return {"id": name, "object": "file", "deleted": True}


class FileContentEndpoint(_StoreEndpoint):
    """Answers GET /v1/files/{file_id}/content with the file, as it is read."""

    async def answer(self, call: Call) -> Outcome:
        policy = self.frontend.policy(self.authenticate(call), "inference")
        with closing(await self.charge(call, policy, in_passing=True)) as charge:
            record = await self.file_record(policy.name, call.scope["path_params"]["file_id"])
            charge.was_served = True
        headers = encode_headers({"content-type": "application/octet-stream"})
        async with self.scoped(call) as scope:
            chunks = self.frontend.files.stream(policy.name, record["id"])
            await call.response.begin(200, headers, await anext(chunks))
            async for chunk in chunks:
                await call.response.stream(chunk)
            await call.response.end_stream(b"")
        return scope.ended()


class BatchesEndpoint(_StoreEndpoint):
    """Answers POST /v1/batches, and GET with a page of the tenant's batches."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        tenant = policy.name
        if call.scope["method"] == "POST":
            return await self._create(call, policy)
        after, limit = _page(call)
        found = list[Json]()
        while len(found) <= limit and (page := await self.ask("batches", tenant, after, limit + 1)):
            for after, fields in page:  # the next page is behind the last of these
                try:
                    found += [self.shown(tenant, after, fields)] if fields else []
                except StoreFault as error:
                    tell(after, str(error))
        return _listed(found, limit)

    async def _create(self, call: Call, policy: EffectivePolicy) -> Json:
        asked = await self.read(call, policy, BATCH.read)
        seconds = window_seconds(asked["completion_window"])
        await self.file_record(policy.name, asked["input_file_id"])
        output, name, now = asked.get("output_expires_after"), new_id("batch_"), int(time.time())
        record = {
            "input_file_id": asked["input_file_id"],
            "endpoint": asked["endpoint"],
            "completion_window": asked["completion_window"],
            "metadata": asked.get("metadata"),
            "output_seconds": output["seconds"] if output else None,
            "key": policy.key,
        }
        fields = {
            "record": sealed_record(self.frontend.sealer, policy.name, name, record),
            "status": "validating",
            "created_at": str(now),
            "expires_at": str(now + seconds),
        }
        most = policy.tenant.batches.open
        if not await self.ask("open", policy.name, name, fields, most):
            raise Unsatisfiable(
                f"Your tenant's limit batches.open is {most}, and as many have not ended: wait for one, cancel one, or "
                "have the limit raised.",
                "input_file_id",
            )
        return self.shown(policy.name, name, fields)


class BatchEndpoint(_StoreEndpoint):
    """Shows a batch: GET /v1/batches/{batch_id}."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        name = call.scope["path_params"]["batch_id"]
        return self.shown(policy.name, name, await self.batch_fields(policy.name, name))


class CancelBatchEndpoint(_StoreEndpoint):
    """Cancels a batch: POST /v1/batches/{batch_id}/cancel."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        tenant, name = policy.name, call.scope["path_params"]["batch_id"]
        await self.batch_fields(tenant, name)
        was_open = await self.ask("cancel", tenant, name)
        fields = await self.batch_fields(tenant, name)
        if not was_open and fields["status"] not in ("cancelling", "cancelled"):
            raise BadRequest(f"The batch is {fields['status']}: it cannot be cancelled any more.", "batch_id")
        return self.shown(tenant, name, fields)


def make_batch_routes(frontend: Frontend) -> list[Route]:
    """The routes of files and batches."""
    return [
        Route("/v1/files", FilesEndpoint(frontend), methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", FileEndpoint(frontend), methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", FileContentEndpoint(frontend), methods=["GET"]),
        Route("/v1/batches", BatchesEndpoint(frontend), methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", BatchEndpoint(frontend), methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", CancelBatchEndpoint(frontend), methods=["POST"]),
    ]
