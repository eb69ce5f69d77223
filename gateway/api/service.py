"""The service that all endpoints share; `gateway/app.py` makes it once."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from admission.admission import Admission
from admission.controller import Controller
from backend.errors import TooManyTokens
from backend.text.tokenizer import INLINE_CHARS, Tokenizer
from gateway.api.body_reader import BodyReader
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.errors import ModelNotFound, context_exceeded
from gateway.http.request_scope import ActiveRequests
from gateway.openai.requests import Limits
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.metrics.metrics import Metrics
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing, Principal
from gateway.tenants.effective_policy import EffectivePolicies, EffectivePolicy, KVShape
from gateway.tenants.kv_leases import KvLeases
from gateway.tenants.live_policy import LivePolicy
from quotas.quotas import Quotas

MESSAGE_BYTES = 128  # rendering a message takes as long as rendering so many bytes of text


@dataclass(frozen=True, slots=True)
class Service:
    """One model behind one engine, with everything that serving a request to it takes."""

    model: str  # the served name
    created: int  # Unix seconds
    end_tokens: frozenset[int]
    limits: Limits
    default_max_tokens: int | None
    tokenizer: Tokenizer
    admission: Admission
    keys: KeyRing
    policies: LivePolicy
    effective_policies: EffectivePolicies
    quotas: Quotas
    kv_leases: KvLeases
    kv_shape: KVShape
    metrics: Metrics
    telemetry: Telemetry
    core: Controller
    core_telemetry: CoreTelemetry
    active_requests: ActiveRequests
    body_reader: BodyReader
    refusal_limiter: RefusalLimiter
    seeds: random.Random

    def policy(self, principal: Principal, scope: str) -> EffectivePolicy:
        """Returns what a key may do at the moment. Raises `Forbidden` if `scope` is not part of it."""
        policy = self.effective_policies.of(principal)
        policy.require(scope)
        return policy

    def check_model(self, model: str) -> None:
        if model != self.model:
            raise ModelNotFound(f"The model {model!r:.200} does not exist; this server has {self.model!r}.", "model")

    async def render(self, tenant: str, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Returns the prompt text of a conversation."""
        size = sum(MESSAGE_BYTES + len(message["content"]) for message in messages)
        return await self.body_reader.offload(
            tenant, size, lambda: self.tokenizer.render_chat(messages, add_generation_prompt)
        )

    async def encode(self, tenant: str, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Returns token ids. A text that the context cannot hold is refused before any time is spent on it. A tenant
        has one long text encoded at a time, so that another tenant finds a thread.
        """
        most = self.limits.max_model_len
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > most:
            raise context_exceeded(fewest, most, param, at_least=True)
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        try:
            async with self.body_reader.encode_lock(tenant):
                return await self.tokenizer.encode_async(text, add_special_tokens, most)
        except TooManyTokens as error:
            raise context_exceeded(error.num_tokens, most, param) from None

    def draw_seed(self) -> int:
        """Returns a seed for a request that brings none."""
        return self.seeds.getrandbits(63)
