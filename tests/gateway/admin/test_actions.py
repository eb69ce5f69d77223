import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.actions import Actions
from gateway.admin.audit_log import AuditLog
from gateway.admin.live_requests import LiveRequests
from gateway.admin.rows import Reasons
from gateway.errors import AuditUnavailable, BadRequest, RequestNotFound
from gateway.http.request_scope import RequestScope
from gateway.tenants.live_policy import LivePolicy
from tests.gateway.admin.test_history import Site
from tests.gateway.telemetry.records import a_record

ONE = "tenants:\n  acme:\n    weight: 2\n"
TWO = "tenants:\n  acme:\n    weight: 3\n"


class Desk(Site):
    def __init__(self, folder: Path, policy: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        if policy is not None:
            self.edit(policy)
        self.policies = LivePolicy(folder / "policy.yaml" if policy is not None else None)
        self.drains = 0
        self.audit = AuditLog(folder / "audit.log")
        requests = LiveRequests(self.telemetry, self.history, Reasons(self.core.scheduler))
        self.actions = Actions(requests, self.policies, self.audit, self.drain)
        self.policies.on_change.append(self.actions.policy_changed)
        self.policies.on_failure.append(self.actions.policy_rejected)

    def edit(self, policy: str) -> None:
        (self.folder / "policy.yaml").write_text(policy)

    def drain(self) -> None:
        self.drains += 1

    def lose_the_log(self) -> None:
        (self.folder / "audit.log").mkdir()

    async def said(self) -> list[tuple[str, str, str]]:
        """Newest first."""
        return [(entry["action"], entry["target"], entry["result"]) for entry in await self.audit.entries()]


async def serve(desk: Desk, request_id: str, ended: list[Any]) -> None:
    """A request that would take for ever."""
    async with RequestScope({}, _silence, _nothing) as scope:
        desk.telemetry.live.add(
            a_record(request_id=request_id, response_id=None, scope=scope, ended=None, timelines=[])
        )
        await asyncio.Event().wait()
    ended.append(scope.error)


async def _silence() -> Any:
    await asyncio.Event().wait()


async def _nothing(message: Any) -> None: ...


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_a_request_that_is_not_there_is_on_record_too(desk: Desk) -> None:
    with pytest.raises(RequestNotFound):
        await desk.actions.cancel("key 1", "x" * 5000)
    ((action, target, result),) = await desk.said()
    assert (action, target) == ("request.cancel", "x" * 200)
    assert result.startswith("refused: No request 'xxx")


async def test_a_request_that_ends_by_itself_meanwhile_was_not_cancelled(tmp_path: Path) -> None:
    desk, ended = Desk(tmp_path), []  # type: ignore[var-annotated]
    task = asyncio.create_task(serve(desk, "r1", ended))
    await asyncio.sleep(0)
    (request_record,) = desk.telemetry.live
    assert request_record.scope is not None
    request_record.scope.fail(BadRequest("something else"))
    with pytest.raises(RequestNotFound, match="ended by itself"):
        await desk.actions.cancel("key 1", "r1")
    await task
    assert [result for _, _, result in await desk.said()] == ["had ended", "cancelled"]


async def test_a_request_whose_error_is_on_its_way_was_not_cancelled(desk: Desk) -> None:
    async with RequestScope({}, _silence, _nothing) as scope:
        desk.telemetry.live.add(a_record(request_id="r1", scope=scope, ended=None, timelines=[]))
    with pytest.raises(RequestNotFound, match="ended by itself"):
        await desk.actions.cancel("key 1", "r1")


async def test_a_request_whose_body_still_comes_cannot_be_cancelled_yet(desk: Desk) -> None:
    desk.telemetry.live.add(a_record(request_id="r1", scope=None, body_read=None))
    with pytest.raises(BadRequest, match="still being read"):
        await desk.actions.cancel("key 1", "r1")


async def test_nothing_is_done_that_cannot_be_recorded(tmp_path: Path) -> None:
    desk, ended = Desk(tmp_path, ONE), []  # type: ignore[var-annotated]
    task = asyncio.create_task(serve(desk, "r1", ended))
    await asyncio.sleep(0)
    desk.lose_the_log()
    desk.edit(TWO)
    for action in (desk.actions.cancel("k", "r1"), desk.actions.reload("k"), desk.actions.drain("k")):
        with pytest.raises(AuditUnavailable, match="Nothing was changed"):
            await action
    assert not task.done() and desk.drains == 0 and desk.policies.num_reloads == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_edit_that_is_not_valid_is_told_and_recorded(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ONE)
    desk.edit("tenants:\n  acme:\n    wieght: 3\n")
    answer = await desk.actions.reload("key 1")
    assert "wieght" in answer["problem"]
    (action, version, result), _ = await desk.said()
    assert (action, version) == ("policy.change", desk.policies.current.version)
    assert result.startswith("stays in force, an edit was not valid:")


async def test_an_edit_takes_effect_even_where_it_cannot_be_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path, ONE)
    desk.lose_the_log()
    desk.edit(TWO)
    await desk.policies.reload()
    assert desk.policies.current.tenant("acme").weight == 3
    assert "not in the audit log" in caplog.text


async def test_changes_found_at_a_start_are_recorded_or_else_logged(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    await desk.actions.started(3)
    assert await desk.said() == [("gateway.start", f"policy {desk.policies.current.version}", "in force; keys: 3")]
    (desk.folder / "audit.log").unlink()
    desk.lose_the_log()
    await desk.actions.started(3)
    assert "not in the audit log: gateway.start" in caplog.text


async def test_the_built_in_policy_has_nothing_to_reload(desk: Desk) -> None:
    with pytest.raises(BadRequest, match="start with --policy PATH"):
        await desk.actions.reload("key 1")
