"""An admin's actions on a running gateway: cancel a request, reload the policy, drain. Each is in the audit log
first.
"""

import logging
from collections.abc import Callable
from typing import Any

from gateway.admin.audit_log import AuditLog
from gateway.admin.live_requests import LiveRequests
from gateway.admin.policy import problem_of
from gateway.errors import ApiError, AuditUnavailable, BadRequest, CancelledByAdmin, RequestNotFound
from gateway.quoting import quoted
from gateway.telemetry.request_record import Cancellable
from gateway.tenants.key_source import KeyChange
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy import Policy
from quotas.policy.policy_file import PolicyError

log = logging.getLogger(__name__)

MAX_TARGET_CHARS = 200
MAX_ID_CHARS = 2000
FILES = "files"  # the actor of an edit


class Actions:
    """Carries out an admin's actions and records them; `drain` stops the server in order."""

    def __init__(
        self, requests: LiveRequests, policies: LivePolicy, audit: AuditLog, drain: Callable[[], object]
    ) -> None:
        self._requests = requests
        self._policies = policies
        self._audit = audit
        self._drain = drain

    async def cancel(self, actor: str, name: str) -> dict[str, Any]:
        """Cancel a live request, with an error to its client. Raises `RequestNotFound`, and `BadRequest` while the
        request is still being read.
        """
        try:
            scope, target = self._cancellable(name)
        except ApiError as error:
            await self._audit.record(actor, "request.cancel", name[:MAX_TARGET_CHARS], f"refused: {error.message}")
            raise
        await self._audit.record(actor, "request.cancel", target, "cancelled")
        scope.fail(CancelledByAdmin())
        if not isinstance(scope.error, CancelledByAdmin):
            await self._audit.record(actor, "request.cancel", target, "had ended")
            raise RequestNotFound(f"The request {quoted(name, 150)} ended by itself.")
        return {"cancelled": True}

    def _cancellable(self, name: str) -> tuple[Cancellable, str]:
        """The scope of a live request, and the request's name in the audit log."""
        request_record = self._requests.live(name)
        if request_record.scope is None:
            raise BadRequest("The request is still being read: it can be cancelled once it has arrived.")
        return request_record.scope, f"{request_record.request_id} of {request_record.tenant}"

    async def reload(self, actor: str) -> dict[str, Any]:
        """Read the policy files now. If that changes the policy, the change is an audit entry of its own."""
        if not self._policies.has_files:
            raise BadRequest(
                "The built-in policy is in force, which has no files: start with --policy PATH to use your own."
            )
        await self._audit.record(actor, "policy.reload", self._policies.current.version, "begun")
        await self._policies.reload()
        return {"version": self._policies.current.version, "problem": problem_of(self._policies)}

    async def drain(self, actor: str) -> dict[str, Any]:
        """Stop the server in order, as a first SIGTERM does."""
        await self._audit.record(actor, "drain", "gateway", "begun")
        self._drain()
        return {"draining": True}

    async def started(self, num_keys: int) -> None:
        """Record the policy and keys in force at the start: they may have been edited while no gateway ran."""
        target = f"policy {self._policies.current.version}"
        await self._note_edit("gateway.start", target, f"in force; keys: {num_keys}")

    async def policy_changed(self, policy: Policy) -> None:
        await self._note_edit("policy.change", policy.version, "in force")

    async def policy_rejected(self, problem: PolicyError) -> None:
        result = f"stays in force, an edit was not valid: {problem!s:.500}"
        await self._note_edit("policy.change", self._policies.current.version, result)

    async def keys_changed(self, change: KeyChange) -> None:
        await self._note_edit("keys.change", f"{change!s:.{MAX_ID_CHARS}}", "in force")

    async def _note_edit(self, action: str, target: str, result: str) -> None:
        """Record an edit of files, which has taken effect already: a failure to write the log is only reported."""
        try:
            await self._audit.record(FILES, action, target, result)
        except AuditUnavailable:
            log.exception("an edit of the files is not in the audit log: %s", action)
