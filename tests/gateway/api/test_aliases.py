"""Names that stand for several models: drawn by weight, and one after another where one refuses for load."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from backend.text.tokenizer import Tokenizer
from gateway.api.engine_request import EngineRequest
from gateway.api.routes import make_app
from gateway.errors import BadRequest, DeadlineUnmeetable, Overloaded
from gateway.tenants.auth import Principal
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.policy.policy import AliasedModel, Policy
from tests.gateway.paper_gateway import Client, Gateway

ORDERED = {"best": (AliasedModel("second"), AliasedModel("paper"))}


@pytest.fixture
async def gateway(embedded_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    gateway = Gateway(embedded_tokenizer)
    first = gateway.frontend.model
    frontend = replace(gateway.frontend, others={"second": (replace(first, name="second"), embedded_tokenizer)})
    gateway.service.models["second"] = gateway.service.models["paper"]  # type: ignore[index]
    gateway.app = make_app(frontend, {})
    set_aliases(gateway, ORDERED)
    gateway.engine.start()
    yield gateway
    await gateway.engine.shut_down()


def set_aliases(gateway: Gateway, aliases: dict[str, tuple[AliasedModel, ...]], models: str = "*") -> None:
    before = gateway.service.policies.current
    default = replace(before.default, models=(models,))
    gateway.service.policies.current = Policy.of(before.classes, default, aliases=aliases)


def refuse(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> list[str | None]:
    """Have the engine refuse requests for these models; returns the models that it was asked for."""
    asked, generate = list[str | None](), gateway.client.generate

    async def judged(request: EngineRequest, *given: Any) -> Any:
        asked.append(request.model)
        if request.model in errors:
            raise errors[request.model]
        return await generate(request, *given)

    monkeypatch.setattr(gateway.client, "generate", judged)
    return asked


async def ask(gateway: Gateway, model: str, **fields: object) -> tuple[int, dict[str, Any]]:
    client = await answered(gateway, model, **fields)
    return client.sent[0]["status"], json.loads(b"".join(part["body"] for part in client.sent[1:]))


async def answered(gateway: Gateway, model: str, **fields: object) -> Client:
    return await sent(gateway, "/v1/completions", {"model": model, "prompt": [5, 6, 7], "max_tokens": 3} | fields)


async def sent(gateway: Gateway, path: str, body: object) -> Client:
    client = Client(path, [json.dumps(body).encode()])
    await client.ask(gateway.app)
    return client


@pytest.mark.parametrize("error", [Overloaded("full", retry_after=1.0), DeadlineUnmeetable("late", 900, 1.0, True)])
async def test_the_next_model_serves_what_one_refuses_for_load(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = refuse(gateway, monkeypatch, {"second": error})
    status, answer = await ask(gateway, "best")
    assert (status, asked, answer["model"]) == (200, ["second", "paper"], "paper")


async def test_headers_are_of_the_model_that_answers(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's context would have cut the answer."""
    model, tokenizer = gateway.frontend.model, gateway.frontend.tokenizer
    short = replace(model, name="second", limits=replace(model.limits, max_model_len=9))
    gateway.app = make_app(replace(gateway.frontend, others={"second": (short, tokenizer)}), {})
    fields = {"max_tokens": 12, "ignore_eos": True, "verbosity": "low"}
    told = [name for name, _ in (await answered(gateway, "second", **fields)).sent[0]["headers"]]
    assert told.count(b"x-sluice-max-tokens") == 1
    refuse(gateway, monkeypatch, {"second": Overloaded("full", retry_after=1.0)})
    client = await answered(gateway, "best", **fields)
    told = [name for name, _ in client.sent[0]["headers"]]
    assert (told.count(b"x-sluice-max-tokens"), told.count(b"x-sluice-ignored")) == (0, 1)


async def test_the_last_refusal_is_told_and_any_other_at_once(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Overloaded("full", retry_after=1.0)
    asked = refuse(gateway, monkeypatch, {"second": full, "paper": full})
    assert (await ask(gateway, "best"))[0] == 503 and asked == ["second", "paper"]
    monkeypatch.undo()
    asked = refuse(gateway, monkeypatch, {"second": BadRequest("no", "prompt")})
    assert (await ask(gateway, "best"))[0] == 400 and asked == ["second"]


async def test_a_model_that_is_named_has_no_fallback(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse(gateway, monkeypatch, {"second": Overloaded("full", retry_after=1.0)})
    assert (await ask(gateway, "second"))[0] == 503 and asked == ["second"]


async def test_an_alias_is_allowed_by_its_own_name(gateway: Gateway) -> None:
    set_aliases(gateway, ORDERED, models="best")
    assert (await ask(gateway, "best"))[0] == 200
    assert (await ask(gateway, "second"))[0] == 404
    set_aliases(gateway, {"best": (AliasedModel("second"),)}, models="best")
    assert (await ask(gateway, "best"))[1]["model"] == "second"
    set_aliases(gateway, ORDERED, models="second")
    status, answer = await ask(gateway, "best")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


TOKENIZED: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a b"}]},
}


@pytest.mark.parametrize("path", TOKENIZED)
async def test_the_tokenizer_of_an_alias_is_that_of_its_first_model(gateway: Gateway, path: str) -> None:
    for models, status in (("*", 200), ("best", 200), ("second", 404)):
        set_aliases(gateway, ORDERED, models=models)
        client = await sent(gateway, path, {"model": "best"} | TOKENIZED[path])
        assert client.sent[0]["status"] == status, client.sent
    set_aliases(gateway, {"best": (AliasedModel("gone"), AliasedModel("paper"))})
    assert (await sent(gateway, path, {"model": "best"} | TOKENIZED[path])).sent[0]["status"] == 404


async def test_an_alias_of_a_model_that_is_not_served_says_so(gateway: Gateway) -> None:
    set_aliases(gateway, {"best": (AliasedModel("gone"), AliasedModel("paper"))})
    status, answer = await ask(gateway, "best")
    assert status == 404 and "'gone'" in answer["error"]["message"]


def test_traffic_is_drawn_by_weight_and_the_rest_follows_in_falling_order(gateway: Gateway) -> None:
    aliased = (AliasedModel("a", 1.0), AliasedModel("b", 6.0), AliasedModel("c", 3.0))
    set_aliases(gateway, {"split": aliased})
    policy = EffectivePolicy(gateway.service.policies.current, Principal("t", "k"))
    drawn = Counter(tuple(policy.models_of("split")) for _ in range(4000))
    assert drawn.keys() == {("a", "b", "c"), ("b", "c", "a"), ("c", "b", "a")}
    for first, share in (("a", 0.1), ("b", 0.6), ("c", 0.3)):
        count = sum(number for models, number in drawn.items() if models[0] == first)
        assert abs(count / 4000 - share) < 0.05
