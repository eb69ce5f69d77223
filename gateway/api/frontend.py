"""The half of the gateway that speaks HTTP: all that reading requests and writing their answers takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backend.errors import TooManyTokens
from backend.text.tokenizer import INLINE_CHARS, Tokenizer
from gateway.api.body_reader import BodyReader
from gateway.api.engine_client import EngineClient
from gateway.errors import ModelNotFound, context_exceeded
from gateway.http.request_scope import ActiveRequests
from gateway.openai.requests import Limits
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing, Principal
from gateway.tenants.effective_policy import EffectivePolicies, EffectivePolicy, KVShape

MESSAGE_BYTES = 128  # rendering a message takes as long as rendering so many bytes of text


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the API, as its clients see it."""

    name: str  # the served name
    created: int  # Unix seconds
    limits: Limits
    default_max_tokens: int | None
    kv_shape: KVShape


@dataclass(frozen=True, slots=True)
class Frontend:
    """One model behind one engine, which may run in another process: that half is asked through `engine`."""

    model: ServedModel
    tokenizer: Tokenizer
    keys: KeyRing
    effective_policies: EffectivePolicies
    telemetry: Telemetry
    deliveries: DeliveryMetrics
    active_requests: ActiveRequests
    body_reader: BodyReader
    engine: EngineClient

    def policy(self, principal: Principal, scope: str) -> EffectivePolicy:
        """Returns what a key may do at the moment. Raises `Forbidden` if `scope` is not part of it."""
        policy = self.effective_policies.of(principal)
        policy.require(scope)
        return policy

    def check_model(self, model: str) -> None:
        if model != self.model.name:
            raise ModelNotFound(
                f"The model {model!r:.200} does not exist; this server has {self.model.name!r}.", "model"
            )

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
        most = self.model.limits.max_model_len
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
