"""The half of the gateway that decides: the engine, its tenants and their limits; `gateway/app.py` makes it once."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

from admission.admission import Admission
from admission.controller import Controller
from backend.engine import Engine
from backend.structured_output.compiler import GrammarCompiler
from gateway.api.adapters import ServedAdapters
from gateway.api.encoding_service import EncodingService
from gateway.api.prompt_names import PromptNames
from gateway.api.prompt_pinner import PromptPinner
from gateway.api.refusal_limiter import RefusalLimiter
from gateway.background import tell_all
from gateway.batches.records import BatchRecords
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.metrics.metrics import Metrics
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing
from gateway.tenants.cache_limits import CacheLimiter
from gateway.tenants.effective_policy import EffectivePolicies, KVShape
from gateway.tenants.kept_usage import KeptUsage
from gateway.tenants.kv_leases import KvLeases
from gateway.tenants.live_policy import LivePolicy, scheduling_policy
from gateway.tenants.shared_debts import SharedDebts
from quotas.policy.policy import Policy
from quotas.quotas import Quotas
from quotas.store.responses import ResponseStore


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One of the engine's models."""

    number: int  # in the order of the settings
    created: int  # Unix seconds
    end_tokens: frozenset[int]
    prompt_names: PromptNames | None  # None: the prefix cache is off
    grammars: GrammarCompiler | None  # None: no answer can be constrained


@dataclass(frozen=True, slots=True)
class Service:
    """One engine with its quotas, policy and caches. It knows nothing of HTTP."""

    model: str  # the served name
    created: int  # Unix seconds
    models: Mapping[str, EngineModel]  # by name, the first one first
    engine: Engine
    admission: Admission
    keys: KeyRing
    policies: LivePolicy
    effective_policies: EffectivePolicies
    quotas: Quotas
    responses: ResponseStore
    batches: BatchRecords
    kv_leases: KvLeases
    cache_limiter: CacheLimiter
    prompt_pinner: PromptPinner
    debts: SharedDebts | None  # None: debts are not shared
    kept_usage: KeptUsage
    kv_shape: KVShape
    metrics: Metrics
    telemetry: Telemetry
    core: Controller
    core_telemetry: CoreTelemetry
    refusal_limiter: RefusalLimiter
    encoding: EncodingService
    adapters: ServedAdapters
    seeds: random.Random

    @property
    def model_names(self) -> frozenset[str]:
        """The names of all models, adapters apart."""
        return frozenset((*self.models, *self.encoding.queues))

    async def follow_policies(self) -> None:
        """Apply the present policy to the engine (weights, classes, bounds, cached memory), and each later one."""

        async def schedule(policy: Policy) -> None:
            self.admission.set_policy(await asyncio.to_thread(scheduling_policy, policy))

        async def apply(policy: Policy) -> None:
            parts = schedule, self.cache_limiter.policy_changed, self.prompt_pinner.policy_changed
            await tell_all(parts, policy)

        await apply(self.policies.current)
        self.policies.on_change.append(apply)
        self.adapters.on_change.append(self.prompt_pinner.pin_anew)
