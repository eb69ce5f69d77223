"""Asks the guardrail of a tenant's policy for its verdict on prompts and answers.

The question is a POST of a JSON object with `stage` (prompt or answer), the request's `request_id`, `tenant`, `key_id`,
`model` and `operation`, and `texts`: each prompt as the model reads it, or an answer as far as it has come. For an
answer there are also `choice`, its number among the answers of the request; `judged`, the number of its characters that
an earlier verdict allowed; and `is_last`. The verdict is a reply 200 with {"action": "allow"} or {"action": "refuse",
"reason": "..."}. Every other reply is a failure, and so is one after the deadline.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import httpx
import orjson

from gateway.errors import GuardrailRefused, GuardrailUnavailable
from gateway.quoting import quoted
from gateway.telemetry.request_record import GuardrailCall, GuardrailVerdict, RequestRecord
from quotas.policy.policy import GuardrailPolicy, GuardrailStage

log = logging.getLogger(__name__)

MAX_VERDICT_BYTES = 16_384  # of a guardrail
MAX_REASON_CHARS = 200
MAX_CALLS_PER_TENANT = 64  # at once; others wait, within their deadline
RETRY_SECONDS = 1.0


class GuardrailFailed(Exception):
    """The guardrail gave no verdict; the message says why."""


class Guardrails:
    """The client of all guardrails, one in each process that serves HTTP. A cancelled call closes its connection."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CALLS_PER_TENANT)
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        self._client = httpx.AsyncClient(limits=limits, headers=headers, timeout=None, trust_env=False)  # noqa: S113
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()  # by tenant
        self._failing: set[str] = set()  # addresses

    def of(self, policy: GuardrailPolicy, record: RequestRecord) -> "Guardrail":
        """The guardrail of a request."""
        tenant = record.tenant or ""
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(MAX_CALLS_PER_TENANT))
        return Guardrail(self, policy, record, turns)

    async def ask(self, policy: GuardrailPolicy, turns: asyncio.Semaphore, question: bytes) -> str | None:
        """The reason of a refusal, or None if the guardrail allows it. Raises `GuardrailFailed`."""
        try:
            async with asyncio.timeout(policy.deadline), turns:
                try:
                    verdict = await self._ask_once(policy.url, question)
                except (httpx.NetworkError, httpx.RemoteProtocolError):  # its server may have closed an idle connection
                    verdict = await self._ask_once(policy.url, question)
        except TimeoutError:
            self._failed(policy, failure := GuardrailFailed(f"it did not answer within {policy.deadline:g} s"))
            raise failure from None
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
            ExceptionGroup,
        ) as error:  # the last two: addresses
            self._failed(policy, failure := GuardrailFailed(f"asking it fails: {type(error).__name__}"))
            raise failure from None
        except GuardrailFailed as error:
            self._failed(policy, error)
            raise
        if policy.url in self._failing:
            self._failing.remove(policy.url)
            log.info("the guardrail %s answers again", policy.url.partition("?")[0])
        return verdict

    async def _ask_once(self, url: str, question: bytes) -> str | None:
        async with self._client.stream("POST", url, content=question) as reply:
            return await _verdict(reply)

    def _failed(self, policy: GuardrailPolicy, failure: GuardrailFailed) -> None:
        """Log the first failure of an address, and not each that follows."""
        if policy.url not in self._failing:
            self._failing.add(policy.url)
            place, until = policy.url.partition("?")[0], policy.on_failure
            log.warning("the guardrail %s gives no verdict: %s; its policy is %s", place, failure, until)

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def open_guardrails(clock: Callable[[], float]) -> AsyncIterator[Guardrails]:
    """`clock` is the engine's, in seconds."""
    guardrails = Guardrails(clock)
    try:
        yield guardrails
    finally:
        await guardrails.close()


async def _verdict(reply: httpx.Response) -> str | None:
    if reply.status_code != httpx.codes.OK:
        raise GuardrailFailed(f"it answered with status {reply.status_code}")
    answer = bytearray()
    async for part in reply.aiter_raw():
        answer += part
        if len(answer) > MAX_VERDICT_BYTES:
            raise GuardrailFailed(f"its answer has more than {MAX_VERDICT_BYTES} bytes")
    match orjson.loads(answer):
        case {"action": "allow"}:
            return None
        case {"action": "refuse", "reason": str(reason)}:
            return reason
        case {"action": "refuse"}:
            return ""
    raise GuardrailFailed("its answer has no action that is known")


class Guardrail:
    """The guardrail of one request, whose calls are in the request's record."""

    def __init__(
        self, guardrails: Guardrails, policy: GuardrailPolicy, record: RequestRecord, turns: asyncio.Semaphore
    ) -> None:
        self._guardrails, self._policy, self._record, self._turns = guardrails, policy, record, turns
        self._about = {
            "request_id": record.request_id,
            "tenant": record.tenant,
            "key_id": record.key,
            "model": record.model,
            "operation": record.operation,
        }

    def judges(self, stage: GuardrailStage) -> bool:
        return stage in self._policy.stages

    @property
    def hold(self) -> int:
        return self._policy.hold

    async def check_prompts(self, texts: Sequence[str]) -> None:
        """Raise `GuardrailRefused` if the guardrail refuses the prompts, and `GuardrailUnavailable` if it gives no
        verdict and its policy is closed.
        """
        await self._check("prompt", {"texts": texts})

    async def check_answer(self, text: str, choice: int, judged: int = 0, is_last: bool = True) -> None:
        """Raise as `check_prompts` about an answer, whose first `judged` characters were allowed before."""
        await self._check("answer", {"texts": [text], "choice": choice, "judged": judged, "is_last": is_last})

    async def _check(self, stage: GuardrailStage, question: dict[str, Any]) -> None:
        guardrails, policy, clock = self._guardrails, self._policy, self._guardrails.clock
        began, verdict, reason = clock(), GuardrailVerdict.CANCELLED, None
        try:
            asked = orjson.dumps({"stage": stage, **self._about, **question})
            reason = await guardrails.ask(policy, self._turns, asked)
            verdict = GuardrailVerdict.ALLOWED if reason is None else GuardrailVerdict.REFUSED
        except GuardrailFailed:
            verdict = GuardrailVerdict.FAILED
        finally:
            self._record.guardrail_calls.append(GuardrailCall(stage, began, clock(), verdict))
        if verdict is GuardrailVerdict.FAILED and policy.on_failure == "closed":
            raise GuardrailUnavailable(
                f"The guardrail of your tenant, which has to allow the {stage}, cannot be asked at the moment.",
                retry_after=RETRY_SECONDS,
            )
        if reason is not None:
            rule = f"The guardrail of your tenant refused the {stage}"
            refused = GuardrailRefused(f"{rule}: {quoted(reason, MAX_REASON_CHARS)}." if reason else f"{rule}.")
            refused.rule = f"{rule}."
            raise refused


class AnswerGuardrail:
    """The guardrail of one streamed answer, which is judged in parts of `hold` characters or more."""

    def __init__(self, guardrail: Guardrail, choice: int) -> None:
        self.hold = guardrail.hold
        self._guardrail = guardrail
        self._choice = choice
        self._text = ""  # so far

    async def check(self, text: str, is_last: bool) -> None:
        """Have the next part of the answer judged. Raises as `Guardrail.check_answer`."""
        judged, self._text = len(self._text), self._text + text
        await self._guardrail.check_answer(self._text, self._choice, judged, is_last)
