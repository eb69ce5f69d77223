"""Makes the runner of batches from the parts of a gateway."""

from gateway.api.frontend import Frontend
from gateway.api.service import Service
from gateway.batches.line_endpoints import LineEndpoints
from gateway.batches.runner import BatchRunner, RunnerParts
from gateway.errors import InvalidApiKey
from gateway.settings.settings import Settings
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy


def make_batch_runner(frontend: Frontend, service: Service, settings: Settings) -> BatchRunner:
    endpoints = LineEndpoints(frontend, lambda make: make(service.policies))

    def policy(tenant: str, key: str) -> EffectivePolicy:
        try:
            principal = frontend.keys.find(tenant, key)
        except InvalidApiKey:  # revoked since: of its settings none are left
            principal = Principal(tenant, key)
        return endpoints.policies.of(principal)

    def models(endpoint: str, policy: EffectivePolicy) -> frozenset[str]:
        aliases = frontend.effective_policies.aliases
        generating = [frontend.model.name, *frontend.others, *frontend.adapters, *aliases]
        served = frontend.encoders if endpoint == "/v1/embeddings" else generating
        return frozenset(filter(policy.allows_model, served))

    parts = RunnerParts(
        store=service.batches.store,
        quotas=service.quotas,
        files=frontend.files,
        endpoints=endpoints,
        policy=policy,
        models=models,
        most_line_bytes=settings.max_body_bytes,
        width=service.core.scheduler.config.max_num_seqs,
        runs_others=lambda: service.core.scheduler.runs_others,
    )
    runner = BatchRunner(parts, service.batches.counts)
    service.batches.on_change.append(runner.look)
    return runner
