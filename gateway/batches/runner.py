"""Computes batches: takes the lease of each that no other replica has, has its lines answered, and writes its results.

Each line is settled once. Its result is written to a file that line and epoch of the lease name; then one script of the
store marks the line as done in that epoch, charges and books it, unless it is done already or the lease is lost
(lua/finish_line.lua). The replica that takes the lease of a dead one computes the lines that are not marked, and reads
the results that the marks name.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson

from gateway.api.body_reader import RoundRobinLock
from gateway.background import Outages
from gateway.batches.file_bytes import FileBytes, LostFile, SealedWriter
from gateway.batches.line_endpoints import LineAnswer, LineEndpoints
from gateway.batches.lines import Line, check_lines, paced, problem_object, read_line, split_lines
from gateway.batches.objects import file_object, opened_record, sealed_record
from gateway.telemetry.metrics.batches import BatchCounts
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.damage import tell
from quotas.errors import QuotaError, StoreFault
from quotas.policy.policy import token_prices
from quotas.quotas import Quotas
from quotas.store.batches import OPEN, BatchStore, DoneLine, FinishedLine
from quotas.usage_row import model_of

log = logging.getLogger(__name__)

TURN_SECONDS = 0.005  # of a line beside requests of others: it takes a millisecond of the event loop
POLL_SECONDS = 1.0  # between looks for batches without a lease, and at the status of a running one
PASS_SECONDS = 5.0  # until a batch that was not to be had is looked at again
SWEEP_SECONDS = 3600.0
STRAY_SECONDS = 86400.0  # after which bytes without a record are deleted
OVERDUE_SECONDS = 3600.0  # after which a batch that has expired and whose input no replica has is ended without it
UNIT_BYTES = 2**16  # of lines in memory: a tenant's batches share as many units of them as the engine's batch has rows
CHECKED_LINE_BYTES = 2**62  # no bound: a replica with a lower one goes on with a batch whose lines another has checked
MAX_TRIES = 3  # of a line that the server failed to answer
LONGEST_RETRY_S = 60.0
RESULT_LOST = {"code": "result_lost", "message": "The line was answered and charged, and the disk has lost the answer."}
NO_ROOM = {
    "code": "file_bytes_exceeded",
    "message": "Your tenant's limit batches.file_bytes left no room for further results: delete files, or have the "
    "limit raised, and send this line again.",
}
Json = dict[str, Any]
T = TypeVar("T")


class LeaseLost(Exception):
    """Another replica has the batch by now."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The parts of the gateway that runs of batches need."""

    store: BatchStore
    quotas: Quotas
    files: FileBytes
    endpoints: LineEndpoints
    policy: Callable[[str, str], EffectivePolicy]  # of a tenant and its key, for lines
    models: Callable[[str, EffectivePolicy], frozenset[str]]  # that may be asked of an endpoint
    most_line_bytes: int
    width: int  # lines of all batches that are answered at once
    runs_others: Callable[[], bool]  # a request that is no line has a slot of the engine


class BatchRunner:
    """Runs the batches of all tenants, as long as the server does."""

    def __init__(self, parts: RunnerParts, counts: BatchCounts) -> None:
        self.parts, self.counts = parts, counts
        self.running: dict[str, BatchRun] = {}  # by the batch's id
        self.running_of: Counter[str] = Counter()  # batches, by tenant
        self.slots = asyncio.Semaphore(parts.width)
        self._turns = asyncio.Lock()  # of lines to be begun
        self.files_lock = RoundRobinLock()  # of the batch whose file is gone through as a whole
        self._changed = asyncio.Event()
        self._swept = -SWEEP_SECONDS
        self._passed: dict[str, float] = {}  # batches that were not to be had here, each until it is looked at again

    def look(self, name: str | None = None) -> None:
        """Look at once for batches, or at a changed one."""
        self._changed.set()
        self._passed.pop(name or "", None)
        if name in self.running:
            self.running[name].changed.set()

    async def turn(self) -> None:
        """Wait for the turn of a line: beside requests of others, the host begins one in `TURN_SECONDS`."""
        async with self._turns:
            if self.parts.runs_others():
                await asyncio.sleep(TURN_SECONDS)

    async def run(self) -> None:
        outages = Outages("batches are not looked for", QuotaError, OSError)
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                with outages:
                    await self._take(group)
                    if time.monotonic() - self._swept >= SWEEP_SECONDS:
                        self._swept = time.monotonic()
                        await self._sweep()
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def _take(self, group: asyncio.TaskGroup) -> None:
        store, now = self.parts.store, time.monotonic()
        self._passed = {name: until for name, until in self._passed.items() if until > now}
        for tenant, name in await store.unclaimed():
            if name in self.running or name in self._passed:
                continue
            self._passed[name] = now + PASS_SECONDS
            try:
                await self._take_one(group, tenant, name)
            except StoreFault as error:
                tell(name, str(error))
            except QuotaError:  # nothing is known of it: it is looked at as soon as the store answers
                self._passed.pop(name, None)
                raise

    async def _take_one(self, group: asyncio.TaskGroup, tenant: str, name: str) -> None:
        store = self.parts.store
        fields = await store.batch(tenant, name)
        if fields is None or fields["status"] not in OPEN:
            self._passed.pop(name, None)
            await store.forget(tenant, name)
            return
        try:
            overdue = int(fields["expires_at"]) + OVERDUE_SECONDS
        except (KeyError, ValueError) as error:
            raise StoreFault(f"the batch {name} is damaged: {error!r}") from error
        record = opened_record(self.parts.files.sealer, tenant, name, fields["record"])
        file = "" if record is None else record["input_file_id"]
        has_input = self.parts.files.has(tenant, file)
        if not (has_input or time.time() >= overdue) and (record is None or await store.file(tenant, file)):
            return  # of a replica with another state directory, or with the secret of the record
        if epoch := await store.claim(tenant, name):
            self._passed.pop(name, None)
            run = self.running[name] = BatchRun(self, tenant, name, epoch, record if has_input else None)
            group.create_task(self._run(run, tenant, name))

    async def _run(self, run: "BatchRun", tenant: str, name: str) -> None:
        self.counts.running += 1
        self.running_of[tenant] += 1
        try:
            await run.run()
        finally:
            self.counts.running -= 1
            self.running_of[tenant] -= 1
            del self.running[name]

    async def _sweep(self) -> None:
        """Delete files whose time is over and which no open batch reads, and bytes that nothing names any more."""
        files, store = self.parts.files, self.parts.store
        opened, inputs = set[str](), set[str]()
        for tenant, name in await store.open_batches():
            opened.add(name)
            for _, fields in await store.read(tenant, [name]):
                record = fields and opened_record(files.sealer, tenant, name, fields["record"])
                inputs.add(record["input_file_id"] if record else "")
        for tenant in await asyncio.to_thread(files.tenants):
            try:
                await self._sweep_tenant(tenant, opened, inputs)
            except StoreFault as error:  # others' files are swept though
                tell(f"files of {tenant}", str(error))

    async def _sweep_tenant(self, tenant: str, opened: Set[str], inputs: Set[str]) -> None:
        """`opened` and `inputs` are open batches and their files. Deletes no bytes if it raises `StoreFault`."""
        files, store = self.parts.files, self.parts.store
        expiries, now = await store.expiries(tenant), time.time()
        old = [name for name, expires in expiries.items() if expires <= now and name not in inputs]
        for name in old:
            await store.delete_file(tenant, name)
        entries = await asyncio.to_thread(files.entries, tenant)
        known = opened | expiries.keys()
        old += [name for name, changed in entries if name not in known and now - changed > STRAY_SECONDS]
        for name in old:
            await asyncio.to_thread(files.delete, tenant, name)


class BatchRun:
    """One batch, from its claim to its end or the loss of its lease."""

    def __init__(self, runner: BatchRunner, tenant: str, name: str, epoch: int, record: Json | None) -> None:
        """`record` is what its client sent; None if that or the input is lost."""
        self.changed = asyncio.Event()  # its status may have changed
        self._runner, self._parts, self._store = runner, runner.parts, runner.parts.store
        self._tenant, self._name, self._epoch, self._record = tenant, name, epoch, record or {}
        self._work: asyncio.Task[None] | None = None  # on its lines; cancelled where the batch is cancelled
        self._is_lost = False  # for good: the store's word may change back
        self._is_full = False  # its tenant's files have no room for further results

    async def run(self) -> None:
        keeping = asyncio.create_task(self._keep_lease())
        try:
            await self._advance_or_fail()
        except asyncio.CancelledError:
            with suppress(QuotaError):
                await self._store.update(self._tenant, self._name, {}, epoch=self._epoch, is_given_back=True)
            raise
        except LeaseLost:
            log.info("another replica goes on with batch %s", self._name)
        except QuotaError as error:
            log.warning("batch %s waits for the store: %s", self._name, error)
        except Exception:
            log.exception("batch %s stopped; a replica tries again", self._name)
        finally:
            keeping.cancel()

    async def _keep_lease(self) -> None:
        """Renew the lease three times in its life, and see whether the batch was cancelled."""
        renewed = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self.changed.wait()
            except TimeoutError:
                pass
            self.changed.clear()
            try:
                if time.monotonic() - renewed >= self._store.lease / 3:
                    self._is_lost |= not await self._store.update(self._tenant, self._name, {}, epoch=self._epoch)
                    renewed = time.monotonic()
                fields = await self._store.batch(self._tenant, self._name) or {}
            except QuotaError:
                self._is_lost |= time.monotonic() - renewed >= self._store.lease
                fields = {}
            if self._work is not None and (self._is_lost or fields.get("status") == "cancelling"):
                self._work.cancel()

    async def _advance_or_fail(self) -> None:
        try:
            if not self._record:
                raise LostFile("its record or its input is gone")
            await self._advance()
        except LostFile as error:
            log.warning("the input of batch %s is not readable: %s", self._name, error)
            await self._fail([problem_object("input_unreadable", "The input file is damaged or gone.")])

    async def _advance(self) -> None:
        fields = await self._store.batch(self._tenant, self._name) or {}
        if fields.get("status") == "validating" and not await self._validate():
            return
        fields = await self._store.batch(self._tenant, self._name) or {}
        expires = int(fields["expires_at"])
        if fields["status"] == "in_progress":
            await self._compute_until(expires)
            fields = await self._store.batch(self._tenant, self._name) or {}
        if fields["status"] == "in_progress":
            num_done = sum(int(fields.get(how, 0)) for how in ("completed", "failed"))
            end = "completed" if num_done == int(fields["total"]) or self._is_full else "expired"
            await self._update({"status": "finalizing", "finalizing_at": _now(), "end": end}, "in_progress")
            found = await self._persistently(partial(self._store.batch, self._tenant, self._name))
            fields = found or {}
        await self._finalize("cancelled" if fields["status"] == "cancelling" else fields["end"], fields)

    # before its lines

    async def _validate(self) -> bool:
        """Check all lines. Returns whether they may run."""
        policy = self._parts.policy(self._tenant, self._record["key"])
        endpoint = self._record["endpoint"]
        check = partial(
            check_lines,
            paced(split_lines(self._chunks(), self._parts.most_line_bytes)),
            endpoint,
            most_lines=policy.tenant.batches.lines,
            most_bytes=self._parts.most_line_bytes,
            models=self._parts.models(endpoint, policy),
        )
        async with self._runner.files_lock.hold(self._tenant):
            checked = await asyncio.to_thread(check)
        if checked.problems:
            await self._fail(checked.problems)
            return False
        stamp = {"status": "in_progress", "in_progress_at": _now(), "total": str(checked.total)}
        return await self._update(stamp | {"model": checked.model or ""}, "validating") or True

    async def _fail(self, problems: list[Json]) -> None:
        errors = {"object": "list", "data": problems}
        sealed = sealed_record(self._parts.files.sealer, self._tenant, self._name, errors)
        await self._close({"status": "failed", "failed_at": _now(), "errors": sealed})

    # its lines

    async def _compute_until(self, expires: int) -> None:
        self._work = asyncio.create_task(self._compute())
        try:
            async with asyncio.timeout(max(0.0, expires - time.time())):
                await asyncio.wait([self._work])
        except TimeoutError:
            pass
        finally:
            self._work.cancel()
            await asyncio.wait([self._work])
            work, self._work = self._work, None
        if self._is_lost:
            raise LeaseLost
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error

    async def _compute(self) -> None:
        done, lines, width = await self._done(), self._lines(), self._parts.width
        held, has_ended = 0, asyncio.Event()

        def release(units: int, _: "asyncio.Task[None]") -> None:
            nonlocal held
            held -= units
            has_ended.set()

        async with asyncio.TaskGroup() as group:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if line.number in done:
                    continue
                if await self._has_no_room():
                    self._is_full = True
                    break
                units = 1 + len(line.body) // UNIT_BYTES
                while held and held + units > width // self._runner.running_of[self._tenant]:
                    has_ended.clear()
                    await has_ended.wait()
                held += units
                group.create_task(self._settle_line(line)).add_done_callback(partial(release, units))

    async def _has_no_room(self) -> bool:
        """True once the tenant's files have all of their bytes: then no further line is begun."""
        most = self._parts.policy(self._tenant, self._record["key"]).tenant.batches.file_bytes
        return await self._persistently(partial(self._store.file_bytes, self._tenant)) >= most

    def _chunks(self) -> Iterator[bytes]:
        return self._parts.files.chunks(self._tenant, self._record["input_file_id"])

    def _lines(self) -> Iterator[Line]:
        for number, (_, raw) in enumerate(split_lines(self._chunks(), CHECKED_LINE_BYTES)):
            yield read_line(raw, number, self._record["endpoint"], CHECKED_LINE_BYTES)

    async def _settle_line(self, line: Line) -> None:
        """Have a line answered, write its result, and settle it."""
        answer = await self._answer(line)
        is_completed = answer.status == 200
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        result = _result(self._name, line, response, None)
        name = _result_name(self._name, line.number, self._epoch)
        await asyncio.to_thread(self._parts.files.write, self._tenant, name, result)
        key = self._record["key"]
        policy = self._parts.policy(self._tenant, key)
        price = policy.tenant.price
        prices = None if price is None else token_prices(price.of(model_of(answer.usage_row)).in_batches)
        finished = FinishedLine(
            self._name,
            self._epoch,
            line.number,
            is_completed,
            answer.usage_row,
            len(result),
            prices,
        )
        finish = partial(self._parts.quotas.store.finish_line, self._tenant, key, policy.charged, finished, answer.used)
        if not await self._persistently(finish):
            self._is_lost = True
            raise LeaseLost
        self._runner.counts.lines[self._tenant, "completed" if is_completed else "failed"] += 1

    async def _answer(self, line: Line) -> LineAnswer:
        """The final answer: a line that is refused for now is tried again, without holding up others meanwhile."""
        tries = 0
        while True:
            async with self._runner.slots:
                await self._runner.turn()
                answer = await self._parts.endpoints.answer(
                    self._record["endpoint"], self._tenant, self._record["key"], line.body
                )
            tries += answer.status == 500
            if answer.retry_after is None or tries >= MAX_TRIES:
                return answer
            await asyncio.sleep(min(answer.retry_after, LONGEST_RETRY_S))

    async def _done(self) -> Mapping[int, DoneLine]:
        return await self._store.done_lines(self._tenant, self._name)

    # after its lines

    async def _finalize(self, end: str, fields: Mapping[str, str]) -> None:
        """Write the results in the order of the lines, and close the batch. It may be done again after a crash."""
        policy = self._parts.policy(self._tenant, self._record["key"])
        life = self._record["output_seconds"] or policy.tenant.batches.retention
        for epoch in range(1, self._epoch):  # what an earlier holder may have left as it was killed
            for name in self._output_names(epoch).values():
                if await self._persistently(partial(self._store.delete_file, self._tenant, name)):
                    await asyncio.to_thread(self._parts.files.delete, self._tenant, name)
        names, done = self._output_names(self._epoch), await self._done()
        write = partial(self._write_results, names, done, end, has_begun="in_progress_at" in fields)
        async with self._runner.files_lock.hold(self._tenant):
            sizes = await asyncio.to_thread(write)
        stamp = {"status": end, f"{end}_at": _now()}
        for what, size in sizes.items():
            if size:
                name, expires = names[what], time.time() + life
                record = file_object(name, size, f"{self._name}_{what}.jsonl", "batch_output", expires)
                sealed = sealed_record(self._parts.files.sealer, self._tenant, name, record)
                told = (self._tenant, name, size, expires, sealed, self._name, self._epoch)
                if not await self._persistently(partial(self._store.put_results, *told)):
                    raise LeaseLost
                stamp[f"{what}_file_id"] = name
        await self._close(stamp)
        await asyncio.to_thread(self._parts.files.delete, self._tenant, self._name)

    def _output_names(self, epoch: int) -> dict[str, str]:
        """The ids of the files of results, which no other epoch's holder writes."""
        stem = f"file-{self._name[6:-5]}{epoch % 2**16:04x}"
        return {"output": f"{stem}0", "error": f"{stem}1"}

    def _write_results(
        self, names: Mapping[str, str], done: Mapping[int, DoneLine], end: str, has_begun: bool
    ) -> dict[str, int]:
        """Write the files of results and of errors. Returns their sizes; an empty one is deleted."""
        files, tenant = self._parts.files, self._tenant
        with files.create(tenant, names["output"]) as output, files.create(tenant, names["error"]) as error:
            for line in paced(self._lines()) if has_begun else ():
                one = done.get(line.number)
                writer: SealedWriter = output if one is not None and one.is_completed else error
                told = {"code": f"batch_{end}", "message": f"The batch was {end} before this line was answered."}
                told = NO_ROOM if end == "completed" else told
                try:
                    result = (
                        None if one is None else files.read(tenant, _result_name(self._name, line.number, one.epoch))
                    )
                except LostFile as lost:
                    log.warning("a result of batch %s is lost: %s", self._name, lost)
                    told, result, writer = RESULT_LOST, None, error
                writer.write(result or _result(self._name, line, None, told))
        sizes = {"output": output.size, "error": error.size}
        for what, size in sizes.items():
            if not size:
                files.delete(tenant, names[what])
        return sizes

    # the store

    async def _update(self, fields: Mapping[str, str], *statuses: str) -> bool:
        """Returns False if the batch had another status, also this one: the store may have been asked twice. Raises
        `LeaseLost`.
        """
        update = partial(self._store.update, self._tenant, self._name, epoch=self._epoch)
        if await self._persistently(partial(update, fields, statuses=statuses)):
            return True
        if await self._persistently(partial(update, {})):
            return False
        raise LeaseLost

    async def _close(self, fields: Mapping[str, str]) -> None:
        kept = self._parts.policy(self._tenant, self._record.get("key", "")).tenant.batches.retention
        update = partial(self._store.update, self._tenant, self._name, fields, epoch=self._epoch, kept=kept)
        if not await self._persistently(partial(update, statuses=OPEN)):
            raise LeaseLost

    async def _persistently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store until it answers, or the lease is lost."""
        while True:
            try:
                return await call()
            except QuotaError as error:
                log.debug("batch %s waits for the store: %s", self._name, error)
            if self._is_lost:
                raise LeaseLost
            await asyncio.sleep(POLL_SECONDS)


def _now() -> str:
    return str(int(time.time()))


def _result_name(batch: str, number: int, epoch: int) -> str:
    return f"{batch}/{number}.{epoch}"


def _result(batch: str, line: Line, response: Json | None, error: Json | None) -> bytes:
    """One line of the files of results."""
    name = f"batch_req_{batch[6:]}_{line.number}"
    return orjson.dumps({"id": name, "custom_id": line.custom_id, "response": response, "error": error}) + b"\n"
