"""Tells why a request waited, was refused or was preempted: `sluice explain` on the event log, in a process apart."""

from pathlib import Path

from gateway.admin.endpoint import Json
from gateway.admin.side_process import SideProcess, SideProcessFailed
from gateway.errors import BadRequest, RequestNotFound

MAX_LINES = 500
MAX_PROBLEM_CHARS = 500


class Explanations:
    """Explains requests one at a time."""

    def __init__(self, event_log: Path | None) -> None:
        self._event_log = event_log
        self._process = SideProcess("explanation")  # which reads the whole log

    async def of(self, name: str) -> Json:
        """The lines about a request. Raises `BadRequest` without an event log, `RequestNotFound`, and as `SideProcess`
        does.
        """
        if self._event_log is None:
            raise BadRequest("There is no event log to explain requests by: start the gateway with --event-log FILE.")
        try:
            told = await self._process.answer("gateway.cli.main", "explain", "--log", self._event_log, "--", name)
        except SideProcessFailed as error:
            raise RequestNotFound(str(error)[-MAX_PROBLEM_CHARS:]) from None
        return {"lines": told.decode(errors="replace").splitlines()[:MAX_LINES]}
