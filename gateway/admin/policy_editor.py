"""Edits of the policy's files from the admin port: checked, on record, written whole, and undone.

The files remain the truth: an edit replaces a passage of one of them, and takes effect as an edit by hand does. Files
that come from elsewhere (a Git checkout, a mounted ConfigMap, a read-only folder) are not written; the answer has the
patch.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import Field

from gateway.admin.audit_log import AuditLog
from gateway.admin.endpoint import Json
from gateway.admin.policy import MAX_POLICY_BYTES, NAME, PastedPolicy, problem_row, without_hash_lines
from gateway.errors import BadRequest, PolicyChanged, PolicyUnavailable
from gateway.http.json_body import Wire
from gateway.tenants.key_store import sync_names, written_beside
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy_file import PolicyError, read_sources
from quotas.policy.source_edit import Passage, passage_of_tenant, patch
from quotas.policy.units import counted

PolicyEdits = Literal["auto", "on", "off"]

MAX_UNDOS = 20  # edits that can be undone
MAX_RECORDED_CHARS = 2000  # of an edit's changes, in the audit log
DIGEST_CHARS = 16
KEEP = -1  # chown(2): the file's user or group as it is


class SourceEdit(PastedPolicy):
    """A text in place of a passage, as `source` gave it; `digest` is that of the whole file, unchanged since."""

    file: str
    digest: str
    tenant: str | None = None  # None: the whole file
    dry_run: bool = False


class WhatIfEdit(PastedPolicy):
    """A text to simulate: a whole policy or, with a `file`, in place of a passage of it."""

    file: str | None = None
    digest: str = ""
    tenant: str | None = None


class Undo(Wire):
    edit: int = Field(ge=1)


@dataclass(frozen=True, slots=True)
class MadeEdit:
    """An edit made here, as far as it takes to undo it."""

    number: int
    at: float  # Unix seconds
    actor: str
    file: str
    tenant: str | None
    before: bytes  # the passage
    after: bytes

    def passage(self, sources: Mapping[str, bytes]) -> Passage | None:
        """The edited passage as it is now; None if it is not as the edit left it."""
        content = sources.get(self.file, b"")
        if self.after:
            start = content.find(self.after)
            found = Passage(self.file, start, start + len(self.after))
            return found if content.count(self.after) == 1 and found.is_whole(sources) else None
        passage = passage_of_tenant({self.file: content}, self.tenant) if self.tenant else None
        return passage if passage and passage.start == passage.end else None


class PolicyEditor:
    """Edits the files, one edit at a time."""

    def __init__(
        self, policies: LivePolicy, audit: AuditLog, mode: PolicyEdits, clock: Callable[[], float] = time.time
    ) -> None:
        """`mode` on: files in a Git checkout are written too; off: none are."""
        self._policies = policies
        self._audit = audit
        self._mode = mode
        self._clock = clock
        self._editing = asyncio.Lock()
        self._made: deque[MadeEdit] = deque(maxlen=MAX_UNDOS)
        self._num_edits = 0

    async def source(self, tenant: str | None) -> Json:
        """The lines of a tenant in its file, or for None the whole of the only file, and whether they can be written.
        Raises `BadRequest` and `PolicyUnavailable`.
        """
        sources = await self._sources()
        passage = await asyncio.to_thread(_passage, sources, None, tenant)
        content = sources[passage.file]
        if passage.end - passage.start > MAX_POLICY_BYTES:
            raise BadRequest(f"{passage.file} has more than {MAX_POLICY_BYTES >> 10} KiB: name one tenant.", "tenant")
        try:
            text = passage.of(sources).decode()
        except UnicodeDecodeError:
            raise PolicyUnavailable(f"{passage.file} is not UTF-8: save it as UTF-8 where it is.") from None
        return {
            "file": passage.file,
            "tenant": tenant,
            "first_line": content.count(b"\n", 0, passage.start) + 1,
            "text": text,
            "digest": _digest(content),
            "obstacle": await asyncio.to_thread(self._obstacle, Path(passage.file)),
        }

    async def edit(self, actor: str, asked: SourceEdit) -> Json:
        """Check an edit and, unless it is a dry run, put it into force: `valid` with `problems`, or with `changes` and
        whether it is `written`; if not, `obstacle` says why and `patch` has the edit. Raises `PolicyChanged` if the
        file has changed since it was read, `BadRequest`, `AuditUnavailable` and `PolicyUnavailable`.
        """
        text = asked.source()
        async with self._editing:
            sources, passage = await self._opened(asked.file, asked.digest, asked.tenant)
            return await self._put(actor, sources, passage, text, asked.tenant, asked.dry_run)

    async def edited(self, asked: WhatIfEdit) -> dict[str, bytes]:
        """The policy's files with an edit in them, or a pasted policy as a file. Raises as `edit` does."""
        text = asked.source()
        if asked.file is None:
            return {NAME: text}
        sources, passage = await self._opened(asked.file, asked.digest, asked.tenant)
        return passage.replaced(sources, text)

    async def _opened(self, file: str, digest: str, tenant: str | None) -> tuple[dict[str, bytes], Passage]:
        """The files, and the passage that was opened with this digest. Raises `BadRequest` and `PolicyChanged`."""
        sources = await self._sources()
        if file not in sources:
            raise BadRequest(f"{file:.200} is no file of the policy.", "file")
        if _digest(sources[file]) != digest:
            raise PolicyChanged(f"{file} has changed since it was read: read it again.")
        return sources, await asyncio.to_thread(_passage, sources, file, tenant)

    async def undo(self, actor: str, number: int) -> Json:
        """Undo an edit made here; the answer is that of `edit`. Raises `PolicyChanged` if its lines have changed
        since, and as `edit` does.
        """
        async with self._editing:
            made = next((one for one in self._made if one.number == number), None)
            if made is None:
                raise BadRequest(f"Edit {number} is not among the last {MAX_UNDOS} made here.", "edit")
            sources = await self._sources()
            passage = await asyncio.to_thread(made.passage, sources)
            if passage is None:
                raise PolicyChanged(f"The lines of edit {number} in {made.file} have changed since.")
            return await self._put(actor, sources, passage, made.before, made.tenant)

    def made(self) -> list[Json]:
        """The edits that can be undone, the newest first."""
        return [
            {"edit": one.number, "at": one.at, "actor": one.actor, "file": one.file, "tenant": one.tenant}
            for one in reversed(self._made)
        ]

    async def _put(
        self,
        actor: str,
        sources: Mapping[str, bytes],
        passage: Passage,
        text: bytes,
        tenant: str | None,
        is_dry_run: bool = False,
    ) -> Json:
        edited = passage.replaced(sources, text)
        before, after = sources[passage.file], edited[passage.file]
        try:
            changes = await self._policies.changes(edited)
        except PolicyError as error:
            problems = [{"file": one.mark.file, **problem_row(one)} for one in error.problems]
            return {"valid": False, "problems": problems}
        found = {"valid": True, "changes": list(changes), "written": False}
        if is_dry_run:
            return found
        obstacle = await asyncio.to_thread(self._obstacle, Path(passage.file))
        if obstacle is not None:
            return found | {"obstacle": obstacle, "patch": await asyncio.to_thread(_patch, passage.file, before, after)}
        target = passage.file if tenant is None else f"{tenant} in {passage.file}"
        await self._audit.record(actor, "policy.edit", target, _recorded(changes))
        try:
            await asyncio.to_thread(_write, Path(passage.file), before, after)
        except PolicyChanged as error:
            await self._audit.record(actor, "policy.edit", target, f"failed: {error.message}")
            raise
        except OSError as error:
            await self._audit.record(actor, "policy.edit", target, f"failed: {error.strerror}")
            obstacle = f"{passage.file} cannot be replaced: {error.strerror}"  # as when it is a mount by itself
            return found | {"obstacle": obstacle, "patch": await asyncio.to_thread(_patch, passage.file, before, after)}
        self._num_edits += 1
        new = after[passage.start : len(after) - (len(before) - passage.end)]
        old = passage.of(sources)
        self._made.append(MadeEdit(self._num_edits, self._clock(), actor, passage.file, tenant, old, new))
        await self._policies.reload()
        return found | {"written": True, "edit": self._num_edits, "version": self._policies.current.version}

    async def _sources(self) -> dict[str, bytes]:
        if self._policies.path is None:
            raise BadRequest(
                "The built-in policy is in force, which has no files: start with --policy PATH to use your own."
            )
        try:
            return await asyncio.to_thread(read_sources, self._policies.path)
        except PolicyError as error:
            raise PolicyUnavailable(f"The policy's files cannot be read: {error!s:.500}.") from None

    def _obstacle(self, file: Path) -> str | None:
        """The reason why a file is not written from here; None without one."""
        if self._mode == "off":
            return "--policy-edits is off"
        if any(folder.is_symlink() for folder in (file, file.parent)):
            return f"{file} is a link, as in a mounted ConfigMap: edit what it was made from"
        if not os.access(file, os.W_OK) or not os.access(file.parent, os.W_OK):
            return f"{file} is read-only to the gateway"
        checkout = _checkout(file)
        if checkout is not None and self._mode == "auto":
            return f"{file} is in the Git checkout {checkout}: apply the patch there, or start with --policy-edits on"
        return None


def _recorded(changes: Iterable[str]) -> str:
    """The changes for the audit log, which every admin reads."""
    lines = without_hash_lines(changes)
    text = "; ".join(lines) or "no change"
    if len(text) > MAX_RECORDED_CHARS:
        text = f"{text[:MAX_RECORDED_CHARS]}… (of {counted(len(lines), 'line')})"
    return text


def _checkout(file: Path) -> Path | None:
    return next((folder for folder in file.absolute().parents if (folder / ".git").exists()), None)


def _patch(file: str, before: bytes, after: bytes) -> str:
    """The patch of an edit, with names from the top of the file's Git checkout, if it is in one."""
    checkout = _checkout(Path(file))
    return patch(file if checkout is None else str(Path(file).absolute().relative_to(checkout)), before, after)


def _passage(sources: Mapping[str, bytes], file: str | None, tenant: str | None) -> Passage:
    """The passage of an edit. Raises `BadRequest` without one."""
    if tenant is not None:
        among = sources if file is None else {file: sources[file]}
        passage = passage_of_tenant(among, tenant)
        if passage is None:
            raise BadRequest("The tenants have no lines of their own below `tenants:`: edit the whole file.", "tenant")
        return passage
    if file is None and len(sources) > 1:
        raise BadRequest(f"The policy has {len(sources)} files: name a tenant.", "tenant")
    name = file or next(iter(sources))
    return Passage(name, 0, len(sources[name]))


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:DIGEST_CHARS]


def _write(file: Path, before: bytes, after: bytes) -> None:
    """Replace the file whole, with its mode and, as far as the system lets us, its owner and group, and wait for the
    disk. Raises `OSError`, and `PolicyChanged` if it has changed meanwhile.
    """
    stat = file.stat()
    draft = written_beside(file, after)
    try:
        draft.chmod(stat.st_mode & 0o7777)
        for user, group in ((stat.st_uid, KEEP), (KEEP, stat.st_gid)):  # a group's member may keep the group alone
            with suppress(OSError):
                os.chown(draft, user, group)
        if file.read_bytes() != before:
            raise PolicyChanged(f"{file} has changed meanwhile: read it again.")
        draft.replace(file)
        sync_names(file.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
