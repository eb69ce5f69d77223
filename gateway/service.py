"""What the endpoints work with, made once by `app`."""

import random
from dataclasses import dataclass

from starlette.types import Receive, Scope

from admission.admission import Admission
from backend.tokenizer import Tokenizer
from gateway.auth import KeyRing, Principal
from gateway.entitlement import Entitlement, Entitlements, KvShape
from gateway.errors import ModelNotFound, context_exceeded
from gateway.kv_leases import KvLeases
from gateway.openai import Limits
from gateway.policies import Policies
from gateway.scope import Lives, read_body
from gateway.telemetry.metrics.metrics import Metrics
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.watched_core import WatchedCore
from quotas.quotas import Quotas


@dataclass(frozen=True, slots=True)
class Service:
    """One model behind one engine, and everything a request to it meets."""

    model: str  # the served name
    created: int  # Unix seconds
    end_tokens: frozenset[int]
    limits: Limits
    default_max_tokens: int | None
    tokenizer: Tokenizer
    admission: Admission
    keys: KeyRing
    policies: Policies
    entitlements: Entitlements
    quotas: Quotas
    kv_leases: KvLeases
    kv_shape: KvShape
    metrics: Metrics
    telemetry: Telemetry
    watched: WatchedCore
    lives: Lives
    max_body_bytes: int
    body_timeout: float  # seconds without a byte
    seeds: random.Random

    def entitlement(self, principal: Principal, scope: str) -> Entitlement:
        """What a key may do, as of now. Raises `Forbidden` when `scope` is not among it."""
        entitlement = self.entitlements.of(principal)
        entitlement.require(scope)
        return entitlement

    def check_model(self, model: str) -> None:
        if model != self.model:
            raise ModelNotFound(f"The model {model!r:.200} does not exist; this server has {self.model!r}.", "model")

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        return await read_body(scope, receive, self.max_body_bytes, self.body_timeout)

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids. A text that the context cannot hold is refused before any time is spent on it."""
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > self.limits.max_model_len:
            raise context_exceeded(fewest, self.limits.max_model_len, param, at_least=True)
        return await self.tokenizer.encode_async(text, add_special_tokens)

    def draw_seed(self) -> int:
        """For a request that brings none."""
        return self.seeds.getrandbits(63)
