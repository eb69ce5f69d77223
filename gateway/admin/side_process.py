"""Answers that take seconds to compute, each from a process of its own at the lowest priority."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from backend.own_process import module_command, module_environment
from gateway.errors import InternalError, Overloaded

TIMEOUT_SECONDS = 60.0  # of a process, its start included
BUSY_SECONDS = 5.0  # after which to ask again
NICENESS = 19  # serving processes go first


class SideProcessFailed(Exception):
    """The process ended with a status other than 0; the message is what it wrote to its standard error."""


class SideProcess:
    """Runs one process of its kind at a time."""

    def __init__(self, what: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`what` names the process in errors, such as "simulation"."""
        self._what, self._timeout_seconds = what, timeout_seconds
        self._is_busy = False

    async def answer(self, module: str, *arguments: object, question: Callable[[], bytes] = bytes) -> bytes:
        """Run a module, which reads the question, made in a thread, and writes its answer.

        Raises `Overloaded` while another runs, `InternalError` if it takes too long or is killed, and
        `SideProcessFailed`.
        """
        if self._is_busy:
            raise Overloaded(f"Another {self._what} is running here: one runs at a time.", retry_after=BUSY_SECONDS)
        self._is_busy = True
        try:
            return await self._answered(module_command(module, *arguments), await asyncio.to_thread(question))
        finally:
            self._is_busy = False

    async def _answered(self, command: list[str], question: bytes) -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "nice", f"-n{NICENESS}", *command, env=module_environment(), stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer, problem = await process.communicate(question)
        except TimeoutError:
            raise InternalError(
                f"The {self._what} took more than {self._timeout_seconds:g} s, and was ended."
            ) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()  # its pipes and the process would stay open
        assert process.returncode is not None
        if process.returncode < 0:
            raise InternalError(f"The process of the {self._what} was killed: try again.")
        if process.returncode:
            raise SideProcessFailed(problem.decode(errors="replace").strip())
        return answer
