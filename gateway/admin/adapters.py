"""Adapters on the admin port: list, load and unload."""

from pathlib import Path

from pydantic import Field

from backend.adapter_registry import LoadedAdapter
from backend.errors import BackendError
from gateway.admin.audit_log import AuditLog
from gateway.admin.rows import Row
from gateway.api.service import Service
from gateway.errors import AdapterNotFound, BadRequest
from gateway.http.json_body import Wire
from gateway.quoting import quoted
from quotas.policy.schema import MODEL


class NewAdapter(Wire):
    name: str = Field(pattern=f"^({MODEL})$", max_length=256)
    path: str = Field(min_length=1, max_length=1024)  # of a folder in the directory of adapters
    model: str | None = Field(None, max_length=256)  # None: the first


class Adapters:
    """Lists, loads and unloads adapters; each change is in the audit log first."""

    def __init__(self, service: Service, directory: Path | None, audit: AuditLog) -> None:
        """Without a `directory` none can be loaded while the gateway serves."""
        self._service, self._directory, self._audit = service, directory, audit

    async def listed(self) -> Row:
        """Return every adapter that may be named, with its requests and its blocks on the device."""
        users = self._service.core.scheduler.kv_manager.blocks.adapters.users
        return {
            "adapters": [self._row(one, users.get(one.adapter, 0)) for one in self._service.adapters.registry],
            "directory": None if self._directory is None else str(self._directory),
        }

    async def load(self, actor: str, asked: NewAdapter) -> Row:
        """Load an adapter, in the place of one of the same name. Raises `BadRequest` and `AuditUnavailable`."""
        if asked.name in self._service.model_names:
            raise BadRequest(f"name: {quoted(asked.name, 200)} is the name of a model that is served.", "name")
        path, model = self._inside(asked.path), asked.model or self._service.model
        if model not in self._service.models:
            known = ", ".join(map(repr, self._service.models))
            raise BadRequest(f"model: {quoted(model, 200)} is no model that has adapters: {known}.", "model")
        await self._audit.record(actor, "adapters.load", f"{asked.name} of {model} from {path}", "begun")
        try:
            loaded = await self._service.adapters.load(asked.name, path, model)
        except BackendError as error:
            await self._audit.record(actor, "adapters.load", asked.name, f"refused: {error!s:.500}")
            raise BadRequest(f"{error!s:.1000}.", "path") from None
        return self._row(loaded, 0)

    async def unload(self, actor: str, name: str) -> Row:
        """Let no further request name an adapter. Raises `AdapterNotFound` and `AuditUnavailable`."""
        if name not in self._service.adapters.cards:
            raise AdapterNotFound(f"There is no adapter with the name {quoted(name, 200)}.")
        await self._audit.record(actor, "adapters.unload", name, "begun")
        try:
            await self._service.adapters.unload(name)
        except KeyError:
            raise AdapterNotFound(f"The adapter {quoted(name, 200)} was unloaded by another admin.") from None
        return {"unloaded": True}

    def _inside(self, given: str) -> Path:
        """Return the folder of a name in the directory of adapters, links followed. Raises `BadRequest`."""
        if self._directory is None:
            raise BadRequest(
                "Adapters are loaded from one directory, and none is set: start with --adapter-dir.", "path"
            )
        directory = self._directory.resolve()
        try:
            path = (directory / given).resolve()
        except (OSError, ValueError, RuntimeError):
            path = directory
        if directory not in path.parents:
            raise BadRequest(f"path: {quoted(given, 200)} is not a folder in {directory}.", "path")
        return path

    def _row(self, loaded: LoadedAdapter, running: int) -> Row:
        adapter, blocks = loaded.adapter, self._service.core.scheduler.kv_manager.blocks
        return {
            "name": adapter.name,
            "model": self._service.adapters.models[loaded.model],
            "path": str(loaded.path),
            "digest": adapter.digest,
            "rank": loaded.rank,
            "bytes": loaded.num_bytes,
            "loaded": loaded.created,
            "kv_blocks": adapter.num_blocks,
            "kv_blocks_on_device": adapter.num_blocks - blocks.adapters.num_lacking(adapter),
            "running": running,
        }
