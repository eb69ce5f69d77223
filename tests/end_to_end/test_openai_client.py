"""The official client against a live server: what it sends is understood, what it gets is what it expects."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.gateway.server_process import PATIENCE, ServerProcess

MODEL = "embedded"
COUNT = "Count from 3 to 12."
COUNTED = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=server.key, max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def chat(client: openai.OpenAI) -> Any:
    """Asks for a chat, which counts unless it is told otherwise."""
    counting = {"model": MODEL, "messages": said(COUNT), "temperature": 0}
    return lambda **fields: client.chat.completions.create(**(counting | fields))


def said(prompt: str) -> list[ChatCompletionUserMessageParam]:
    return [{"role": "user", "content": prompt}]


def test_a_chat_is_answered_with_the_right_text(chat: Any) -> None:
    reply = chat()
    (choice,) = reply.choices
    assert choice.message.content is not None
    assert choice.message.content.rstrip(".") == COUNTED
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply._request_id


def test_a_stream_is_the_same_text_in_pieces(chat: Any) -> None:
    chunks, whole = list(chat(stream=True)), chat()
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert len(chunks) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_last_in_a_stream_that_asks_for_it(chat: Any) -> None:
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    whole = chat()
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_an_answer_is_cut_at_max_tokens_and_says_so(chat: Any) -> None:
    for reply in (chat(max_tokens=5), chat(max_completion_tokens=5)):
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 5
        assert COUNTED.startswith(reply.choices[0].message.content or "?")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_its_stop_string(chat: Any, stream: bool) -> None:
    reply = chat(stop=[" 7", "never"], stream=stream)
    if isinstance(reply, openai.Stream):
        chunks = [chunk.choices[0] for chunk in reply]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = reply.choices[0].message.content or "", reply.choices[0].finish_reason
    assert (text, reason) == ("3, 4, 5, 6,", "stop")


def test_a_seed_makes_a_sampled_answer_reproducible(chat: Any) -> None:
    def tell(seed: int) -> Any:
        record = said("Tell me a story of four sentences about a fox.")
        return chat(messages=record, temperature=1.5, seed=seed, max_tokens=60).choices[0].message.content

    first = tell(1)
    assert first == tell(1)
    assert len({first, tell(2), tell(3)}) > 1


def test_a_stream_that_the_client_closes_early_leaves_it_usable(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model=MODEL, messages=said(COUNT), stream=True) as stream:
        next(iter(stream))
    assert client.models.retrieve(MODEL).id == MODEL


async def test_many_at_once_are_each_answered_right(async_client: openai.AsyncOpenAI) -> None:
    """Streamed and whole answers of very different lengths share the engine's steps."""
    counts = [(1 + 3 * n % 17, 2 + 5 * n % 23) for n in range(24)]
    asked = {f"Count from {a} to {a + more}.": ", ".join(map(str, range(a, a + more + 1))) for a, more in counts}

    async def ask(prompt: str, stream: bool) -> tuple[str, bool]:
        create = async_client.chat.completions.create
        if not stream:
            reply = await create(model=MODEL, messages=said(prompt), temperature=0)
            return reply.choices[0].message.content or "", reply.choices[0].finish_reason == "stop"
        events = await create(model=MODEL, messages=said(prompt), temperature=0, stream=True)
        chunks = [chunk.choices[0] async for chunk in events]
        return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason == "stop"

    answers = await asyncio.gather(*(ask(prompt, n % 2 == 0) for n, prompt in enumerate(asked)))
    alone = [await ask(prompt, False) for prompt in [*asked][:4]]
    wrong = [prompt for prompt, answer in zip(asked, answers, strict=True) if answer != (asked[prompt], True)]
    assert answers[:4] == alone
    assert len(wrong) <= 2, wrong


def test_a_text_prompt_is_continued(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="3, 4, 5, 6,", temperature=0, max_tokens=4)
    assert reply.object == "text_completion"
    assert reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 4


def test_token_ids_are_continued_like_their_text(server: ServerProcess, client: openai.OpenAI) -> None:
    tokenized = server.post("/tokenize", prompt="3, 4, 5, 6,").json()
    by_text = client.completions.create(model=MODEL, prompt="3, 4, 5, 6,", temperature=0, max_tokens=6)
    by_ids = client.completions.create(model=MODEL, prompt=tokenized["tokens"], temperature=0, max_tokens=6)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage == by_text.usage


def test_a_list_of_prompts_is_one_choice_each_in_order(client: openai.OpenAI) -> None:
    prompts = ["1, 2, 3,", "Monday,", "a, b, c,"]
    create = client.completions.create
    together = create(model=MODEL, prompt=prompts, temperature=0, max_tokens=6)
    alone = [create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [reply.choices[0].text for reply in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(reply.usage.prompt_tokens for reply in alone if reply.usage)


def test_a_list_of_token_id_lists_streams_side_by_side(client: openai.OpenAI) -> None:
    prompts = [[5, 6, 7], [8, 9], [10]]
    create = client.completions.create
    options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": True}
    *chunks, last = create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=6, stream=True, stream_options=options
    )
    whole = create(model=MODEL, prompt=prompts, temperature=0, max_tokens=6)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert last.usage == whole.usage


def test_the_model_is_listed_and_retrieved(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model


def test_a_wrong_key_is_an_authentication_error(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.chat.completions.create(model=MODEL, messages=said(COUNT))
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
    assert caught.value.request_id


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=said(COUNT))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4/vision")


def test_an_unknown_url_is_not_found_and_has_a_request_id(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model=MODEL, prompt="text")
    assert caught.value.code == "unknown_url"
    assert caught.value.request_id
    for wrong, path in (("", "/models"), ("/v1/v1", "/v1/v1/models")):
        base = str(client.base_url).rstrip("/").removesuffix("/v1")
        with pytest.raises(
            openai.NotFoundError, match=f"{path}. It is /v1/models here: correct the client's base URL."
        ):
            client.with_options(base_url=f"{base}{wrong}").models.list()


@pytest.mark.parametrize(
    ("param", "field"),
    [
        ("n", {"n": 0}),
        ("temperature", {"temperature": 3}),
        ("max_tokens", {"max_tokens": -2}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "f g"}}]}),
        ("functions", {"functions": [{"name": "f"}]}),
    ],
)
def test_a_bad_field_is_a_bad_request_that_names_it(chat: Any, param: str, field: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(extra_body=field)
    assert caught.value.param == param
    assert caught.value.request_id


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(messages=said("fox " * 5000))
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in caught.value.message


def test_an_answer_has_at_most_what_the_context_leaves_and_cannot_have_more_at_least(chat: Any) -> None:
    long = said("7 " * 960)  # which leaves little to compute
    with pytest.raises(openai.BadRequestError) as caught:
        chat(extra_body={"min_tokens": 2040})
    assert (caught.value.code, caught.value.param) == ("quota_unsatisfiable", "min_tokens")
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(extra_body={field: 10**9, "min_tokens": 2040})
        assert (caught.value.code, caught.value.param) == ("quota_unsatisfiable", "min_tokens")
        reply = chat(messages=long, extra_body={field: 10**9, "ignore_eos": True})
        assert (reply.choices[0].finish_reason, reply.usage.total_tokens) == ("length", 2048)


def test_a_completion_that_names_no_length_has_16_tokens_and_a_chat_what_the_context_leaves(
    client: openai.OpenAI, chat: Any
) -> None:
    short = client.completions.create(model=MODEL, prompt="Once", extra_body={"ignore_eos": True})
    assert short.usage is not None
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (16, "length")
    asked = client.completions.create(model=MODEL, prompt="Once", max_tokens=20, extra_body={"ignore_eos": True})
    assert asked.usage is not None
    assert asked.usage.completion_tokens == 20
    counted = chat()
    assert counted.usage is not None
    assert (counted.choices[0].finish_reason, counted.usage.completion_tokens > 16) == ("stop", True)


def test_continuous_usage_tells_the_tokens_so_far_in_every_chunk(client: openai.OpenAI, chat: Any) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    streamed: Any = {"max_tokens": 9, "stream": True, "stream_options": options}
    text = client.completions.create(model=MODEL, prompt=["Once", "Twice upon"], **streamed)
    for stream in (chat(**streamed), text):
        *chunks, last = stream
        assert last.usage is not None
        assert last.choices == []
        by_choice: dict[int, list[Any]] = {}
        for chunk in chunks:
            by_choice.setdefault(chunk.choices[0].index, []).append(chunk.usage)
        for usages in by_choice.values():
            counts = [usage.completion_tokens for usage in usages]
            assert counts == sorted(counts)
            assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
        ends = [usages[-1] for usages in by_choice.values()]
        assert sum(usage.completion_tokens for usage in ends) == last.usage.completion_tokens
        assert sum(usage.prompt_tokens for usage in ends) == last.usage.prompt_tokens


def test_the_clients_own_request_id_comes_back(client: openai.OpenAI) -> None:
    reply = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
