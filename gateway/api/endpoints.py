"""The endpoints that generate nothing: models, limits, tokens, health, version and metrics."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from typing import Any

import orjson

from admission.outcome import Outcome
from gateway.api.endpoint import Call, Endpoint
from gateway.api.service import Service
from gateway.errors import ApiError
from gateway.http.responses import encode_headers
from gateway.openai.replies import detokenized, model_card, models_list, tokenized
from gateway.openai.requests import parse_detokenize_request, parse_tokenize_request
from gateway.telemetry.metrics.prometheus import CONTENT_TYPE
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.policy.limit import Limit, Rate
from quotas.reservation import Ask, LimitState, Usage


def limits_report(policy: EffectivePolicy, version: str, states: Sequence[LimitState]) -> dict[str, Any]:
    """Returns the body of /v1/limits. A limit that `states` does not know is listed without what is left of it."""
    known = {state.limit: state for state in states}
    return {
        "object": "list",
        "tenant": policy.name,
        "policy_version": version,
        "default_class": policy.service_class(None).name,
        "highest_class": policy.tenant.highest_class,
        "models": list(policy.tenant.models),
        "data": [_entry(limit, known.get(limit)) for limit in policy.limits],
    }


def _entry(limit: Limit, state: LimitState | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "object": "limit",
        "resource": limit.resource.value,
        "applies_to": "key" if limit.key else "tenant",
        "amount": limit.amount,
        "per": limit.window.unit if limit.window else None,
        "burst": limit.window.burst if isinstance(limit.window, Rate) else None,
    }
    if state is not None:
        entry |= {"remaining": state.remaining, "reset_seconds": round(state.reset, 3)}
    return entry


class ModelsEndpoint(Endpoint):
    """Answers GET /v1/models and /v1/models/{model}."""

    async def answer(self, call: Call) -> Outcome:
        service = self.service
        principal = self.authenticate(call)
        policy = service.policy(principal, "inference")
        card = model_card(service.model, service.created, service.limits.max_model_len)
        name = call.scope.get("path_params", {}).get("model")
        if name is None:
            allowed = policy.tenant.allows_model(service.model, policy.key)
            await call.response.reply(models_list([card] if allowed else []))
        else:
            service.check_model(name)
            policy.check_model(name)
            await call.response.reply(orjson.dumps(card))
        return Outcome.COMPLETED


class LimitsEndpoint(Endpoint):
    """Answers GET /v1/limits with the limits of the caller and what is left of them."""

    async def answer(self, call: Call) -> Outcome:
        service = self.service
        principal = self.authenticate(call)
        policy = service.policy(principal, "limits")
        states = await service.quotas.states(policy.name, policy.key, policy.charged)
        body = limits_report(policy, service.policies.current.version, states)
        await call.response.reply(orjson.dumps(body))
        return Outcome.COMPLETED


class TokenizeEndpoint(Endpoint):
    """Answers POST /tokenize with the token ids of a prompt or of a conversation.

    A call counts as a request and costs no tokens, since the model computes nothing. A limit that is spent refuses it
    before its body is read.
    """

    async def answer(self, call: Call) -> Outcome:
        service, tokenizer = self.service, self.service.tokenizer
        principal = self.authenticate(call)
        policy = service.policy(principal, "inference")
        with closing(await self.charge(call, policy, Ask())) as grant:
            request = await self.read(call, principal, parse_tokenize_request)
            _check_model(service, policy, request.model)
            text = request.prompt
            if request.messages is not None:
                text = await service.render(principal.tenant, request.messages, request.add_generation_prompt)
            param = "prompt" if request.messages is None else "messages"
            token_ids = await service.encode(principal.tenant, text or "", request.add_special_tokens, param)
            strings = [tokenizer.id_to_token(token_id) for token_id in token_ids] if request.return_token_strs else None
            grant.measure = Usage
            await call.response.reply(tokenized(token_ids, service.limits.max_model_len, strings))
        return Outcome.COMPLETED


class DetokenizeEndpoint(Endpoint):
    """Answers POST /detokenize with the text of token ids. A call counts as one of `TokenizeEndpoint` does."""

    async def answer(self, call: Call) -> Outcome:
        service = self.service
        principal = self.authenticate(call)
        policy = service.policy(principal, "inference")
        with closing(await self.charge(call, policy, Ask())) as grant:
            request = await self.read(call, principal, partial(parse_detokenize_request, limits=service.limits))
            _check_model(service, policy, request.model)
            text = service.tokenizer.decode(request.tokens, skip_special_tokens=False)
            grant.measure = Usage
            await call.response.reply(detokenized(text))
        return Outcome.COMPLETED


def _check_model(service: Service, policy: EffectivePolicy, model: str | None) -> None:
    """Check the model, of which None means the served one. Raises `ModelNotFound`."""
    if model is not None:
        service.check_model(model)
    policy.check_model(service.model)


class HealthEndpoint(Endpoint):
    """Answers GET /startupz, /livez and their like: 200 while `healthy`, else 503. They need no key."""

    def __init__(
        self, service: Service, healthy: Callable[[], bool], details: Callable[[], dict[str, object]] = dict
    ) -> None:
        super().__init__(service)
        self._healthy = healthy
        self._details = details

    async def answer(self, call: Call) -> Outcome:
        healthy = self._healthy()
        body = orjson.dumps({"status": "ok" if healthy else "unavailable", **self._details()})
        await call.response.reply(body, 200 if healthy else 503)
        return Outcome.COMPLETED


class VersionEndpoint(Endpoint):
    """Answers GET /version, by which clients of vLLM tell what they talk to; it needs no key, there or here."""

    async def answer(self, call: Call) -> Outcome:
        await call.response.reply(_VERSION)
        return Outcome.COMPLETED


class FailingEndpoint(Endpoint):
    """Answers every request with one error."""

    def __init__(self, service: Service, error: ApiError) -> None:
        super().__init__(service)
        self._error = error

    async def answer(self, call: Call) -> Outcome:
        raise self._error


class MetricsEndpoint(Endpoint):
    """Answers GET /metrics in Prometheus' text format."""

    async def answer(self, call: Call) -> Outcome:
        await call.response.reply(self.service.metrics.prometheus_text(), headers=_METRICS)
        return Outcome.COMPLETED


_VERSION = orjson.dumps({"version": version("sluice")})
_METRICS = encode_headers({"content-type": CONTENT_TYPE})
