"""Answers, as the official client's own types read them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.openai import replies
from gateway.openai.replies import ChatChunks, Choice, CompletionChunks, Ending, Identity, TokenUsage
from gateway.sse import DONE

USAGE = TokenUsage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
CHOICES = [Choice("Hi é😀\n", "stop"), Choice("", "length")]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def data(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    value: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return value


def test_usage_counts_and_details_add_up() -> None:
    usage = ChatCompletion.model_validate_json(replies.chat_completion(Identity.of_chat("m"), CHOICES, USAGE)).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 5, 12)
    assert (usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens) == (4, 0)


@pytest.mark.parametrize("include_usage", [True, False])
def test_chat_chunks_are_what_the_client_expects(include_usage: bool) -> None:
    chunks = ChatChunks(Identity.of_chat("m", "fp"), include_usage)
    events = [chunks.start(), chunks.text("Hi"), chunks.text("!"), chunks.finish(Ending("stop"))]
    parsed = [ChatCompletionChunk.model_validate(data(event)) for event in events]
    assert [chunk.choices[0].delta.role for chunk in parsed] == ["assistant", None, None, None]
    assert [chunk.choices[0].delta.content for chunk in parsed] == ["", "Hi", "!", None]
    assert [chunk.choices[0].finish_reason for chunk in parsed] == [None, None, None, "stop"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in parsed}) == 1
    assert all(("usage" in data(event)) == include_usage for event in events)
    assert all(data(event).get("usage") is None for event in events)


def test_the_usage_chunk_has_no_choices() -> None:
    for chunks in (ChatChunks(Identity.of_chat("m"), True), CompletionChunks(Identity.of_completion("m"), True)):
        last = data(chunks.end(USAGE).removesuffix(DONE))
        assert last["choices"] == []
        assert last["usage"] == USAGE.to_json()
    ChatCompletionChunk.model_validate(data(ChatChunks(Identity.of_chat("m"), True).end(USAGE).removesuffix(DONE)))
    assert ChatChunks(Identity.of_chat("m"), False).end(USAGE) == DONE


def test_completion_chunks_are_what_the_client_expects() -> None:
    chunks = CompletionChunks(Identity.of_completion("m"), include_usage=False, index=3)
    assert chunks.start() == b""
    text, end = data(chunks.text("Hi")), data(chunks.finish(Ending("length")))
    assert text["choices"] == [{"index": 3, "text": "Hi", "logprobs": None, "finish_reason": None}]
    assert Completion.model_validate(end).choices[0].finish_reason == "length"
    assert text["object"] == "text_completion"


@given(text=TEXT, model=TEXT)
def test_any_text_and_model_survive_the_layout(text: str, model: str) -> None:
    for include_usage in (True, False):
        chunk = data(ChatChunks(Identity.of_chat(model), include_usage).text(text))
        assert (chunk["choices"][0]["delta"]["content"], chunk["model"]) == (text, model)
        chunk = data(CompletionChunks(Identity.of_completion(model), include_usage).text(text))
        assert (chunk["choices"][0]["text"], chunk["model"]) == (text, model)


def test_tokens_are_told_as_vllm_tells_them() -> None:
    assert json.loads(replies.tokenized([5, 6], 4096)) == {
        "count": 2, "max_model_len": 4096, "tokens": [5, 6], "token_strs": None,
    }  # fmt: skip
    assert json.loads(replies.tokenized([5], 8, ["a"]))["token_strs"] == ["a"]
    assert json.loads(replies.detokenized("é")) == {"prompt": "é"}
