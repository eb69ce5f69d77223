import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.text.tokenizer import INLINE_CHARS, Tokenizer
from gateway.api.frontend import Frontend
from gateway.errors import ContextLengthExceeded, ModelNotFound
from gateway.openai.conversation import Conversation
from tests.gateway.paper_gateway import Gateway
from tests.gateway.tenants.test_effective_policy import effective

FRONTEND = cast(Any, SimpleNamespace(model=SimpleNamespace(name="served-7b"), adapters={}, others=(), encoders=()))


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


async def test_of_a_text_that_no_context_holds_only_a_beginning_is_rendered(
    embedded_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, render, sizes = Gateway(embedded_tokenizer).frontend, embedded_tokenizer.render_chat, list[int]()

    def spy(messages: Any, *given: Any, **variables: Any) -> str:
        sizes.append(sum(len(message["content"]) for message in messages))
        return render(messages, *given, **variables)

    monkeypatch.setattr(embedded_tokenizer, "render_chat", spy)
    huge = Conversation(({"role": "user", "content": "one two " * 500_000},))
    with pytest.raises(ContextLengthExceeded, match="messages holds at least") as refused:
        await frontend.render("t", huge)
    context = frontend.model.limits.max_model_len
    assert sizes == [embedded_tokenizer.most_chars(context + 1)], "a hundredth"
    assert refused.value.param == "messages"
    with pytest.raises(ContextLengthExceeded, match="messages holds at least"):
        await frontend.render("t", huge, is_cut=True)
    spaces = Conversation(({"role": "user", "content": " " * 500_000 + "Hi."},))
    assert len(await frontend.render("t", spaces)) < 1000, "which the template leaves out"
    answered = Conversation(({"role": "assistant", "content": "one two " * 100_000},))
    assert len(await frontend.render("t", answered)) > 800_000, "a template may leave out what an answer says"
