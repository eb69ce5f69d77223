"""Answers the lines of batches by the endpoints that answer requests: the same checks, limits and engine, in the spare
class and without a connection.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import orjson
from starlette.types import Message, Scope

from admission.outcome import Outcome
from backend.scheduler.sequence import SPARE_CLASS
from gateway.api.chat_dialect import ChatDialect
from gateway.api.dialects import CompletionDialect
from gateway.api.encoding_endpoints import EmbeddingsEndpoint
from gateway.api.endpoint import Call, Endpoint, TokensEndpoint
from gateway.api.frontend import Frontend
from gateway.api.generation import GenerationEndpoint
from gateway.api.response_dialect import ResponseDialect
from gateway.errors import ApiError, GuardrailRefused
from gateway.openai.embeddings import parse_embeddings_request
from gateway.telemetry.request_record import current
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicies, EffectivePolicy
from quotas.policy.policy import SPARE_CLASS_NAME, ClassPolicy
from quotas.reservation import NOTHING, Usage

LINE = "sluice.line"  # key of the ASGI extension with the tenant and the key id of a line
SPARE = ClassPolicy(SPARE_CLASS_NAME, SPARE_CLASS)
TEMPORARY = frozenset({429, 500, 503, 504})  # statuses after which a line is tried again, unless the answer forbids it


class LinePolicy(EffectivePolicy):
    """The policy of a key for the lines of its batches."""

    is_line = True

    def service_class(self, tier: str | None) -> ClassPolicy:
        return SPARE


class LinePolicies(EffectivePolicies):
    make = LinePolicy


class _Line(TokensEndpoint):
    """Takes the tenant and the key from the batch: neither is proved by a secret, and the key may be revoked since."""

    cancelled = Outcome.DISCONNECTED  # with its batch

    def authenticate(self, call: Call) -> Principal:
        tenant, key = call.scope["extensions"][LINE]
        principal = self.frontend.keys.find(tenant, key)
        call.record.tenant, call.record.key = principal.tenant, principal.key_id
        call.record.authenticated = self.frontend.telemetry.clock()
        self.frontend.active_requests.check_open()
        return principal

    def present_policy(self, call: Call) -> EffectivePolicy:
        return self.frontend.policy(self.authenticate(call), "inference")

    async def _delay_refusal(self, call: Call, refusal: ApiError) -> None:
        """Refusals of lines are not counted against their key."""


class LineGenerationEndpoint(_Line, GenerationEndpoint):
    pass


class LineEmbeddingsEndpoint(_Line, EmbeddingsEndpoint):
    pass


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line, and its use, which is not booked yet."""

    status: int
    body: Any
    request_id: str
    used: Usage
    retry_after: float | None  # seconds; None: the answer is final
    usage_row: str | None = None  # of the ledger, in which its use is to be booked


class LineEndpoints:
    """Answers lines by their endpoint's path."""

    def __init__(self, frontend: Frontend, policies: Callable[[type[EffectivePolicies]], EffectivePolicies]) -> None:
        """`policies` makes effective policies of the class given."""
        own = replace(frontend, effective_policies=policies(LinePolicies))
        self.policies = own.effective_policies
        self._endpoints: Mapping[str, Endpoint] = {
            "/v1/chat/completions": LineGenerationEndpoint(own, ChatDialect()),
            "/v1/completions": LineGenerationEndpoint(own, CompletionDialect()),
            "/v1/responses": LineGenerationEndpoint(own, ResponseDialect(own)),
            "/v1/embeddings": LineEmbeddingsEndpoint(own, parse_embeddings_request),
        }

    async def answer(self, path: str, tenant: str, key: str, body: bytes) -> LineAnswer:
        """Have a line answered. A cancellation ends it, and costs its tenant nothing but engine time."""
        exchange = _Exchange(body)
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "client": None,
            "extensions": {LINE: (tenant, key)},
        }
        await self._endpoints[path](scope, exchange.receive, exchange.send)
        record = current.get()
        assert record is not None, "the endpoint has begun it"
        reply = orjson.loads(exchange.answer)
        measure = record.engine.measure
        was_computed = exchange.status == 200 or isinstance(record.error, GuardrailRefused)
        used = measure() if measure is not None and was_computed else NOTHING
        is_spent = exchange.status == 429 and not exchange.may_retry  # a budget, whose next period may begin in time
        is_final = exchange.status not in TEMPORARY or not (exchange.may_retry or is_spent)
        retry_after = inf if is_spent else None if is_final else exchange.retry_after
        return LineAnswer(exchange.status, reply, record.request_id, used, retry_after, record.engine.usage_row)


class _Exchange:
    """One request and its answer, in memory."""

    def __init__(self, body: bytes) -> None:
        self.status, self.retry_after, self.may_retry, self.answer = 0, 1.0, True, b""
        self._body: bytes | None = body

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.get_running_loop().create_future()  # no client disconnects
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message["headers"])
            self.retry_after = float(headers.get(b"retry-after-ms", b"1000")) / 1000
            self.may_retry = headers.get(b"x-should-retry") != b"false"
        else:
            self.answer += message.get("body", b"")
