"""Asks the guard of a tenant's policy for its verdict on prompts and answers.

A guard is asked by POST, with a JSON object that has `stage` (prompt or answer), the request's `request_id`, `tenant`,
`key_id`, `model` and `operation`, and `texts`: each prompt as the model reads it, or an answer as far as it has come.
For an answer there are also `choice`, its number among the answers of the request; `judged`, the number of its
characters that an earlier verdict allowed; and `is_last`. The guard answers 200 with {"action": "allow"} or
{"action": "refuse", "reason": "..."}. Everything else is a failure, and so is an answer after the deadline.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import httpx
import orjson

from gateway.errors import GuardRefused, GuardUnavailable
from gateway.quoting import quoted
from gateway.telemetry.request_record import GuardCall, GuardVerdict, RequestRecord
from quotas.policy.policy import GuardPolicy, GuardStage

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 16_384  # of a guard
MAX_REASON_CHARS = 200
MAX_CALLS_PER_TENANT = 64  # at once; others wait, within their deadline
RETRY_SECONDS = 1.0


class GuardFailed(Exception):
    """The guard gave no verdict; the message says why."""


class Guards:
    """The client of all guards, one in each process that serves HTTP. A cancelled call closes its connection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CALLS_PER_TENANT)
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        self._client = httpx.AsyncClient(limits=limits, headers=headers, timeout=None, trust_env=False)  # noqa: S113
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()  # by tenant
        self._failing: set[str] = set()  # addresses

    def of(self, policy: GuardPolicy, record: RequestRecord) -> "Guard":
        """The guard of a request."""
        tenant = record.tenant or ""
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(MAX_CALLS_PER_TENANT))
        return Guard(self, policy, record, turns)

    async def ask(self, policy: GuardPolicy, turns: asyncio.Semaphore, question: bytes) -> str | None:
        """The reason of a refusal, or None if the guard allows it. Raises `GuardFailed`."""
        try:
            async with (
                asyncio.timeout(policy.deadline),
                turns,
                self._client.stream("POST", policy.url, content=question) as reply,
            ):
                verdict = await _verdict(reply)
        except TimeoutError:
            self._failed(policy, failure := GuardFailed(f"it did not answer within {policy.deadline:g} s"))
            raise failure from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._failed(policy, failure := GuardFailed(f"it cannot be asked: {type(error).__name__}"))
            raise failure from None
        except GuardFailed as error:
            self._failed(policy, error)
            raise
        if policy.url in self._failing:
            self._failing.remove(policy.url)
            log.info("the guard %s answers again", policy.url)
        return verdict

    def _failed(self, policy: GuardPolicy, failure: GuardFailed) -> None:
        """Log the first failure of an address, and not each that follows."""
        if policy.url not in self._failing:
            self._failing.add(policy.url)
            log.warning("the guard %s gives no verdict: %s; its policy is %s", policy.url, failure, policy.on_failure)

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def open_guards(clock: Callable[[], float]) -> AsyncIterator[Guards]:
    """`clock` is the engine's, in seconds."""
    guards = Guards(clock)
    try:
        yield guards
    finally:
        await guards.close()


async def _verdict(reply: httpx.Response) -> str | None:
    if reply.status_code != httpx.codes.OK:
        raise GuardFailed(f"it answered with status {reply.status_code}")
    answer = bytearray()
    async for part in reply.aiter_raw():
        answer += part
        if len(answer) > MAX_ANSWER_BYTES:
            raise GuardFailed(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    try:
        match orjson.loads(answer):
            case {"action": "allow"}:
                return None
            case {"action": "refuse", "reason": str(reason)}:
                return reason
            case {"action": "refuse"}:
                return ""
    except orjson.JSONDecodeError:
        pass
    raise GuardFailed("its answer has no action that is known")


class Guard:
    """The guard of one request, whose calls are in the request's record."""

    def __init__(self, guards: Guards, policy: GuardPolicy, record: RequestRecord, turns: asyncio.Semaphore) -> None:
        self._guards, self._policy, self._record, self._turns = guards, policy, record, turns
        self._about = {
            "request_id": record.request_id,
            "tenant": record.tenant,
            "key_id": record.key,
            "model": record.model,
            "operation": record.operation,
        }

    def judges(self, stage: GuardStage) -> bool:
        return stage in self._policy.stages

    @property
    def hold(self) -> int:
        return self._policy.hold

    async def check_prompts(self, texts: Sequence[str]) -> None:
        """Raise `GuardRefused` if the guard refuses the prompts, and `GuardUnavailable` if it does not answer and its
        policy is closed.
        """
        await self._check("prompt", {"texts": texts})

    async def check_answer(self, text: str, choice: int, judged: int = 0, is_last: bool = True) -> None:
        """Raise as `check_prompts` about an answer, whose first `judged` characters were allowed before."""
        await self._check("answer", {"texts": [text], "choice": choice, "judged": judged, "is_last": is_last})

    async def _check(self, stage: GuardStage, question: dict[str, Any]) -> None:
        guards, policy, clock = self._guards, self._policy, self._guards.clock
        began, verdict, reason = clock(), GuardVerdict.CANCELLED, None
        try:
            asked = orjson.dumps({"stage": stage, **self._about, **question})
            reason = await guards.ask(policy, self._turns, asked)
            verdict = GuardVerdict.ALLOWED if reason is None else GuardVerdict.REFUSED
        except GuardFailed:
            verdict = GuardVerdict.FAILED
        finally:
            self._record.guard_calls.append(GuardCall(stage, began, clock(), verdict))
        if verdict is GuardVerdict.FAILED and policy.on_failure == "closed":
            raise GuardUnavailable(
                f"The guard of your tenant, which has to allow the {stage}, cannot be asked at the moment.",
                retry_after=RETRY_SECONDS,
            )
        if reason is not None:
            raise GuardRefused(stage, quoted(reason, MAX_REASON_CHARS) if reason else "")


class AnswerGuard:
    """The guard of one streamed answer, which is judged in parts of `hold` characters or more."""

    def __init__(self, guard: Guard, choice: int) -> None:
        self.hold = guard.hold
        self._guard = guard
        self._choice = choice
        self._text = ""  # so far

    async def check(self, text: str, is_last: bool) -> None:
        """Have the next part of the answer judged. Raises as `Guard.check_answer`."""
        judged, self._text = len(self._text), self._text + text
        await self._guard.check_answer(self._text, self._choice, judged, is_last)
