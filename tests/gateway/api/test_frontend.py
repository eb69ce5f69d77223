import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.text.tokenizer import INLINE_CHARS, Tokenizer
from gateway.api.frontend import Frontend
from gateway.errors import ModelNotFound
from tests.gateway.paper_gateway import Gateway
from tests.gateway.tenants.test_effective_policy import effective

FRONTEND = cast(Any, SimpleNamespace(model=SimpleNamespace(name="served-7b")))


def refusal(model: str | None, *models: str) -> str:
    """Returns what a tenant is told that may use these models, or all."""
    with pytest.raises(ModelNotFound) as refused:
        Frontend.check_model(FRONTEND, model, effective(**({"models": models} if models else {})))
    return refused.value.message


def test_a_tenant_of_the_served_model_is_told_its_name() -> None:
    assert refusal("other") == "The model 'other' does not exist; this server has 'served-7b'."
    Frontend.check_model(FRONTEND, "served-7b", effective(models=("served-7b",)))
    for model in (None, "served-7b"):
        Frontend.check_model(FRONTEND, model, effective())
        Frontend.check_model(FRONTEND, model, None)


def test_a_tenant_denied_the_model_is_told_nothing_of_it() -> None:
    assert refusal("served-7b", "small") == "The model 'served-7b' does not exist or you have no access to it."
    for model in ("small", "other"):
        assert refusal(model, "small") == f"The model '{model}' does not exist or you have no access to it."
    assert "served" not in refusal(None, "small")


async def test_long_texts_are_encoded_beside_the_event_loop_and_short_ones_on_it(
    embedded_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, encode, threads = Gateway(embedded_tokenizer).frontend, embedded_tokenizer.encode_text, list[bool]()
    frontend = replace(
        frontend, model=replace(frontend.model, limits=replace(frontend.model.limits, max_model_len=2**20))
    )

    def spy(text: str, add_special_tokens: bool, *most: int) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special_tokens, *most)

    monkeypatch.setattr(embedded_tokenizer, "encode_text", spy)
    long = "fox " * INLINE_CHARS
    found = await asyncio.gather(*[frontend.encode("t", text, True, "prompt") for text in ("fox", long)])
    assert found == [encode("fox", True), encode(long, True)]
    assert threads == [True, False]
