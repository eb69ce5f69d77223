"""The endpoints that generate nothing: models, limits, tokens, health, loads, version and metrics."""

from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from admission.outcome import Outcome
from backend.text.response_templates.template import CALLS, REASONING, ResponseTemplate
from gateway.anthropic.message_request import CountRequest, parse_count_request
from gateway.api.endpoint import Call, Endpoint
from gateway.api.engine_client import KVMemory
from gateway.api.frontend import Frontend
from gateway.errors import ApiError, Forbidden
from gateway.http.json_body import JsonBody
from gateway.http.responses import encode_headers
from gateway.openai.limits import Limits
from gateway.openai.replies import detokenized, model_card, models_list, tokenized
from gateway.openai.requests import DetokenizeRequest, TokenizeRequest, parse_detokenize_request, parse_tokenize_request
from gateway.replica.sglang import loads, model_info, server_info
from gateway.telemetry.metrics.prometheus import CONTENT_TYPE
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.version import VERSION
from quotas.policy.limit import Limit, Rate
from quotas.policy.policy import ALL_MODELS
from quotas.reservation import LimitState


def limits_report(policy: EffectivePolicy, version: str, states: Sequence[LimitState], kv: KVMemory) -> dict[str, Any]:
    """The body of /v1/limits. A limit without a state is listed without its remainder."""
    known = {state.limit.name: state for state in states}
    return {
        "object": "list",
        "tenant": policy.name,
        "team": policy.tenant.team,
        "policy_version": version,
        "default_class": policy.service_class(None).name,
        "highest_class": policy.highest_class.name,
        "models": [ALL_MODELS] if policy.models is None else sorted(policy.models),
        "kv_memory": {
            "held_bytes": kv.held,
            "kept_bytes": kv.kept,
            "leased_bytes": kv.leased,
            "limit_bytes": policy.kv_bytes,
            "remaining_bytes": None if policy.kv_bytes is None else max(0, policy.kv_bytes - kv.held),
        },
        "data": [_entry(limit, known.get(limit.name)) for limit in policy.limits],
    }


def _entry(limit: Limit, state: LimitState | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "object": "limit",
        "resource": limit.resource.value,
        "applies_to": limit.owner,
        "amount": limit.number(limit.amount),
        "currency": limit.currency,
        "per": limit.window.unit if limit.window else None,
        "soft": limit.is_soft,
        "burst": limit.window.burst if isinstance(limit.window, Rate) else None,
    }
    if state is not None:
        entry |= {"remaining": limit.number(state.remaining), "reset_seconds": round(state.reset, 3)}
        entry |= {"set_aside": limit.number(state.set_aside), "lost": limit.number(state.lost)}
    return entry


class ModelsEndpoint(Endpoint):
    """Answers GET /v1/models and /v1/models/{model}."""

    async def answer(self, call: Call) -> Outcome:
        frontend, policy = self.frontend, _policy_of_asker(self, call)
        cards = [card for card in self._cards() if policy is None or policy.allows_model(card["id"])]
        name = call.scope.get("path_params", {}).get("model")
        if name is None:
            return await self.complete(call, models_list(cards))
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            frontend.check_model(name, policy)
        return await self.complete(call, orjson.dumps(card))

    def _cards(self) -> list[dict[str, Any]]:
        model, encoders = self.frontend.model, [one.setup for one in self.frontend.encoders.values()]
        cards = [model_card(model.name, model.created, model.limits.max_model_len, _capabilities(self.frontend))]
        for name, (other, _) in self.frontend.others.items():
            can = _capabilities(self.frontend.of(name))
            cards.append(model_card(name, other.created, other.limits.max_model_len, can))
        for alias, models in self.frontend.effective_policies.aliases.items():
            served = self.frontend.of(models[0].model)
            length, can = served.model.limits.max_model_len, _capabilities(served)
            cards.append(model_card(alias, model.created, length, can, served.model.name))
        for one in encoders:
            can = {"embeddings": one.kind == "embed", "score": True}
            cards.append(model_card(one.name, one.created, one.max_tokens, can))
        for adapter in self.frontend.adapters.values():
            served = self.frontend.of(adapter.model)
            length, can = served.model.limits.max_model_len, _capabilities(served)
            cards.append(model_card(adapter.name, adapter.created, length, can, adapter.model))
        return cards


def _policy_of_asker(endpoint: Endpoint, call: Call) -> EffectivePolicy | None:
    """The policy of the caller's key; None if public models need no key and none was sent. Raises `ApiError`, also for
    a wrong key that was not needed.
    """
    frontend = endpoint.frontend
    if frontend.public_models and call.response.credentials is None:
        return None
    return frontend.policy(endpoint.authenticate(call), "inference")


def _capabilities(frontend: Frontend) -> dict[str, bool]:
    """The model's features, by the names that other servers and clients use."""
    tokenizer = frontend.tokenizer
    return {
        "completions": True,
        "chat": tokenizer.has_chat_template,
        "streaming": True,
        "structured_outputs": frontend.model.has_grammars,
        "tools": _has(tokenizer.response_template, CALLS),
        "reasoning": _has(tokenizer.response_template, REASONING),
        "logprobs": True,
        "fill_in_the_middle": tokenizer.fill_in_the_middle is not None,
        "vision": False,
        "audio": False,
        "embeddings": False,
    }


def _has(template: ResponseTemplate | None, names: tuple[str, ...]) -> bool:
    return template is not None and template.field(names) is not None


class LimitsEndpoint(Endpoint):
    """Answers GET /v1/limits with the limits of the caller and the rest of each."""

    async def answer(self, call: Call) -> Outcome:
        frontend = self.frontend
        policy = frontend.policy(self.authenticate(call), "limits")
        states = await frontend.engine.limit_states(policy, call.record.session)
        kv = await frontend.engine.kv_memory(policy)
        body = limits_report(policy, frontend.effective_policies.version, states, kv)
        return await self.complete(call, orjson.dumps(body))


class TokenizerEndpoint(Endpoint):
    """Answers what the tokenizer alone is asked for.

    A call counts as a request and costs no tokens, since the model computes nothing. A limit that is spent refuses it
    before its body is read.
    """

    def parse(self, body: JsonBody, limits: Limits) -> Any:
        """Returns a request that has `model` and `ignored`. Raises `ApiError`."""
        raise NotImplementedError

    async def reply(self, request: Any, tenant: str, frontend: Frontend) -> bytes:
        """The body of the answer, by the tokenizer of a model's frontend."""
        raise NotImplementedError

    async def answer(self, call: Call) -> Outcome:
        frontend = self.frontend
        policy = frontend.policy(self.authenticate(call), "inference")
        with closing(await self.charge(call, policy)) as charge:
            request = await self.read(call, policy, self._parsed)
            model = frontend.first_of(request.model)
            if model != request.model:
                policy.check_model(request.model)
            frontend.check_model(model, policy if model == request.model else None)
            body = await self.reply(request, policy.name, frontend.of(model))
            charge.was_served = True
        self.tell_ignored(call, request.ignored)
        return await self.complete(call, body)

    def _parsed(self, body: JsonBody) -> Any:
        model = self.frontend.first_of(self.frontend.model_in(body))
        return self.parse(body, self.frontend.of(model).model.limits)


class TokenizeEndpoint(TokenizerEndpoint):
    """Answers POST /tokenize with the token ids of a prompt or of a conversation."""

    def parse(self, body: JsonBody, limits: Limits) -> TokenizeRequest:
        return parse_tokenize_request(body, limits)

    async def reply(self, request: TokenizeRequest, tenant: str, frontend: Frontend) -> bytes:
        text, param = request.prompt or "", "prompt"
        if request.conversation is not None:
            text, param = await frontend.render(tenant, request.conversation), "messages"
        token_ids = await frontend.encode(tenant, text, request.add_special_tokens, param)
        strings = await frontend.spellings(tenant, token_ids) if request.return_token_strs else None
        return tokenized(token_ids, frontend.model.limits.max_model_len, strings)


class DetokenizeEndpoint(TokenizerEndpoint):
    """Answers POST /detokenize with the text of token ids."""

    def parse(self, body: JsonBody, limits: Limits) -> DetokenizeRequest:
        return parse_detokenize_request(body, limits)

    async def reply(self, request: DetokenizeRequest, tenant: str, frontend: Frontend) -> bytes:
        return detokenized(await frontend.decode(tenant, request.tokens, skip_special_tokens=False))


class CountTokensEndpoint(TokenizerEndpoint):
    """Counts the tokens of a prompt: POST /v1/messages/count_tokens."""

    def parse(self, body: JsonBody, limits: Limits) -> CountRequest:
        return parse_count_request(body, limits)

    async def reply(self, request: CountRequest, tenant: str, frontend: Frontend) -> bytes:
        text = await frontend.render(tenant, request.conversation, is_cut=True)
        token_ids = await frontend.encode(tenant, text, False, "messages", is_cut=True)
        return orjson.dumps({"input_tokens": len(token_ids)})


class TokenizerInfoEndpoint(Endpoint):
    """Answers GET /tokenizer_info with the tokenizer's configuration and its chat template, as vLLM does."""

    async def answer(self, call: Call) -> Outcome:
        self.frontend.check_model(None, _policy_of_asker(self, call))
        return await self.complete(call, self.frontend.tokenizer.info)


class HealthEndpoint(Endpoint):
    """Answers GET /startupz, /livez and their like: 200 while the probe holds, else 503. They need no key."""

    def __init__(self, frontend: Frontend, probe: str, is_detailed: bool = False) -> None:
        super().__init__(frontend)
        self._probe = probe
        self._is_detailed = is_detailed

    async def answer(self, call: Call) -> Outcome:
        healthy, details = await self.frontend.engine.health(self._probe)
        body = orjson.dumps({"status": "ok" if healthy else "unavailable", **(details if self._is_detailed else {})})
        return await self.complete(call, body, 200 if healthy else 503)


class LoadsEndpoint(Endpoint):
    """Answers GET /v1/loads, by which SGLang's router balances: totals, told only where what is served is public."""

    async def answer(self, call: Call) -> Outcome:
        _policy_of_asker(self, call)
        if not self.frontend.public_models:
            raise Forbidden("The load of all tenants is told on the admin port, and here with --public-models on.")
        totals = await self.frontend.engine.load()
        return await self.complete(call, orjson.dumps(loads(totals, datetime.now(UTC))))


class ServerInfoEndpoint(Endpoint):
    """Answers GET /server_info, from which SGLang's router learns a replica's model."""

    async def answer(self, call: Call) -> Outcome:
        _policy_of_asker(self, call)
        model = self.frontend.model
        totals = await self.frontend.engine.load()
        return await self.complete(call, orjson.dumps(server_info(model.name, model.limits.max_model_len, totals)))


class ModelInfoEndpoint(Endpoint):
    """Answers GET /model_info, as `ServerInfoEndpoint` does of the server."""

    async def answer(self, call: Call) -> Outcome:
        _policy_of_asker(self, call)
        return await self.complete(call, orjson.dumps(model_info(self.frontend.model.name)))


class VersionEndpoint(Endpoint):
    """Answers GET /version, by which clients of vLLM tell what they talk to; it needs no key, there or here."""

    async def answer(self, call: Call) -> Outcome:
        return await self.complete(call, _VERSION)


class FailingEndpoint(Endpoint):
    """Answers every request with one error, which counts as a refusal of the key if a valid one was sent."""

    def __init__(self, frontend: Frontend, error: ApiError) -> None:
        super().__init__(frontend)
        self._error = error

    async def answer(self, call: Call) -> Outcome:
        with suppress(ApiError):
            self.authenticate(call)
        raise self._error


class MetricsEndpoint(Endpoint):
    """Answers GET /metrics in Prometheus' text format."""

    async def answer(self, call: Call) -> Outcome:
        return await self.complete(call, await self.frontend.engine.metrics_text(), headers=_METRICS)


_VERSION = orjson.dumps({"version": VERSION})
_METRICS = encode_headers({"content-type": CONTENT_TYPE})
