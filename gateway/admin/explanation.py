"""Why a request waited, was refused or was preempted: `sluice explain` on the event log, in a process of its own."""

import asyncio
from contextlib import suppress
from pathlib import Path

from backend.own_process import module_command, module_environment
from gateway.admin.endpoint import Json
from gateway.errors import BadRequest, InternalError, Overloaded, RequestNotFound

EXPLANATION_SECONDS = 60.0  # for the process, which reads the whole log
MAX_LINES = 500


class Explanations:
    """Explains requests one at a time."""

    def __init__(self, event_log: Path | None) -> None:
        self._event_log = event_log
        self._is_busy = False

    async def of(self, name: str) -> Json:
        """The lines about a request. Raises `BadRequest` without an event log, `Overloaded`, `RequestNotFound` and
        `InternalError`.
        """
        if self._event_log is None:
            raise BadRequest("There is no event log to explain requests by: start the gateway with --event-log FILE.")
        if self._is_busy:
            raise Overloaded("Another request is being explained: one at a time.", retry_after=5.0)
        self._is_busy = True
        try:
            return await self._of(name, self._event_log)
        finally:
            self._is_busy = False

    @staticmethod
    async def _of(name: str, event_log: Path) -> Json:
        process = await asyncio.create_subprocess_exec(
            "nice",
            *module_command("gateway.cli.main", "explain", "--log", event_log, "--", name),
            env=module_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(EXPLANATION_SECONDS):
                lines, problem = await process.communicate()
        except TimeoutError:
            raise InternalError(f"No explanation within {EXPLANATION_SECONDS:g} s: the event log is long.") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        if process.returncode is not None and process.returncode < 0:
            raise InternalError("The process that reads the event log was killed: try again.")
        if process.returncode:
            raise RequestNotFound(problem.decode(errors="replace").strip()[-500:])
        return {"lines": lines.decode(errors="replace").splitlines()[:MAX_LINES]}
