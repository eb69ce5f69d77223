"""What is told of an answer's tokens agrees with its text, however it comes and wherever it ends."""

import json
from types import SimpleNamespace
from typing import Any, cast

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.sampling_params import SamplingParams
from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.sequence import FinishReason
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.response_templates.parser import ResponseParser
from backend.text.response_templates.template import ResponseTemplate
from backend.text.tokenizer import Tokenizer
from gateway.api.detailed_text import DetailedChoiceWriter, DetailedText, Telling, told_choices
from gateway.api.dialects import CompletionDialect, Prompt
from gateway.http.responses import ResponseWriter
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, CompletionChunks, Identity
from gateway.openai.requests import CompletionRequest, TokenDetails
from tests.backend import tiny_tokenizers as tiny
from tests.backend.sequences import make_sequence
from tests.backend.text.response_templates.families import FAMILIES
from tests.examples import examples

TOKENIZER = Tokenizer(tiny.byte_level_bpe())
SENTENCE = TOKENIZER.encode_text("the 日 cat 😀 sat\n", add_special_tokens=False)
PROMPT = TOKENIZER.encode_text("sat the 日", add_special_tokens=False)
ids = st.lists(st.sampled_from(SENTENCE), min_size=1, max_size=24)


def answer(
    token_ids: list[int],
    stop: tuple[str, ...] = (),
    text: str | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    message: AnswerMessage | None = None,
    **fields: Any,
) -> DetailedText:
    """An answer of which all tokens are there."""
    request = CompletionRequest(
        model="m", prompts=("",), sampling=SamplingParams(stop=stop), stream=False, include_usage=False,
        continuous_usage=False, include_stop=False, skip_special_tokens=True, add_special_tokens=True,
        service_tier=None, user=None, details=TokenDetails(top=1, ids=True), echo=text is not None, **fields,
    )  # fmt: skip
    sequence = make_sequence("r", "tenant", PROMPT, 100)
    sequence.output.extend(token_ids)
    sequence.logprobs = [TokenLogprobs(-float(n), 1, [token_id], [-float(n)]) for n, token_id in enumerate(token_ids)]
    sequence.prompt_logprobs = [TokenLogprobs(-9.0, 1, [token_id], [-9.0]) for token_id in PROMPT[1:]]
    stream = TokenStream(sequence)
    stream.finish_reason = FinishReason.LENGTH
    generation = SimpleNamespace(stop=lambda *_: None)
    deliveries = SimpleNamespace(delivered=lambda *_: 0.0)
    telling = Telling.of(request, CompletionDialect(), tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer, stop, in_message=message is not None)
    prompt = Prompt(PROMPT, (), text)
    return DetailedText(stream, detokenizer, cast(Any, generation), cast(Any, deliveries), telling, prompt, message)


async def whole(text: DetailedText, num_answers: int = 1) -> dict[str, Any]:
    choice = await text.choice()
    (told,) = await told_choices([text], [choice], 1, 1)
    reply = CompletionDialect().complete(Identity("i", 0, "m"), [told], cast(Any, SimpleNamespace(to_json=dict)))
    found: dict[str, Any] = json.loads(reply)["choices"][0]
    return found


async def streamed(text: DetailedText) -> dict[str, Any]:
    """The same choice, joined of what a stream says of it."""
    body = b""

    async def stream(data: bytes) -> None:
        nonlocal body
        body += data

    response = cast(ResponseWriter, SimpleNamespace(stream=stream, exchange=None))
    await DetailedChoiceWriter(response, text, CompletionChunks(Identity("i", 0, "m"), False), False).write_all()
    joined: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": {}}
    for event in body.decode().split("\n\n")[:-1]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        joined["text"] += choice["text"]
        joined["token_ids"] += choice.get("token_ids", [])
        for name, array in (choice["logprobs"] or {}).items():
            joined["logprobs"].setdefault(name, []).extend(array)
        joined["finish_reason"] = choice["finish_reason"]
    return joined


@settings(max_examples=examples(50))
@given(ids)
async def test_each_token_of_an_answer_begins_where_its_text_does(token_ids: list[int]) -> None:
    choice = await whole(answer(token_ids))
    told = choice["logprobs"]
    assert choice["token_ids"] == token_ids
    assert told["token_logprobs"] == [-float(n) for n in range(len(token_ids))]
    assert told["text_offset"] == sorted(told["text_offset"])
    for before, token, offset in zip(["", *told["tokens"]], told["tokens"], told["text_offset"], strict=False):
        if not before.startswith("bytes:") and not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset)


@settings(max_examples=examples(50))
@given(ids, st.sampled_from([(), ("sat",), (" c",), ("日",), ("\n", "the")]), st.booleans())
async def test_a_stream_tells_what_a_whole_answer_does(token_ids: list[int], stop: tuple[str, ...], echo: bool) -> None:
    text = TOKENIZER.decode(PROMPT) if echo else None
    one, other = await whole(answer(token_ids, stop, text)), await streamed(answer(token_ids, stop, text))
    logprobs = one["logprobs"] if one["logprobs"]["tokens"] else {}
    assert (one["text"], logprobs, one["token_ids"]) == (other["text"], other["logprobs"], other["token_ids"])
    assert one["finish_reason"] == other["finish_reason"]


@settings(max_examples=examples(50))
@given(ids, st.sampled_from(["sat", " c", "日", "t s", "😀"]))
async def test_tokens_that_begin_at_a_stop_strings_end_are_not_told(token_ids: list[int], stop: str) -> None:
    choice = await whole(answer(token_ids, (stop,)))
    offsets, length = choice["logprobs"]["text_offset"], len(choice["text"])
    if choice["finish_reason"] == "stop":
        assert all(offset < length for offset in offsets)
        assert len(offsets) <= len(choice["token_ids"])
    else:
        assert len(offsets) == len(token_ids)


async def test_delimiters_of_a_message_are_as_long_for_what_is_told_as_in_its_text() -> None:
    core = tokenizers.Tokenizer.from_str(tiny.byte_level_bpe().to_str())
    core.add_special_tokens(["[TOOL_CALLS]"])
    template = ResponseTemplate(FAMILIES["mistral"].source)
    tokenizer = Tokenizer(core, response_template=template)
    token_ids = tokenizer.encode_text("abc [TOOL_CALLS] the def", add_special_tokens=False)
    text = answer(token_ids, ("def",), tokenizer=tokenizer, message=AnswerMessage(ResponseParser(template)))
    choice = await whole(text)
    assert choice["finish_reason"] == "stop"
    told = "".join(choice["logprobs"]["tokens"])
    assert "[TOOL_CALLS]" in told and not told.endswith("f")


async def test_an_echoed_prompt_comes_before_the_answer_in_text_and_tokens() -> None:
    text = TOKENIZER.decode(PROMPT)
    choice = await whole(answer(SENTENCE, text=text))
    told = choice["logprobs"]
    assert choice["text"] == text + TOKENIZER.decode(SENTENCE)
    assert told["token_logprobs"] == [None, *[-9.0] * (len(PROMPT) - 1), *[-float(n) for n in range(len(SENTENCE))]]
    assert told["text_offset"][len(PROMPT)] == len(text) and told["text_offset"] == sorted(told["text_offset"])
    assert (told["top_logprobs"][0], choice["prompt_token_ids"]) == (None, PROMPT)


async def test_a_prompt_alone_is_told_without_the_token_that_was_drawn_for_it() -> None:
    text = TOKENIZER.decode(PROMPT)
    for told in (whole, streamed):
        choice = await told(answer(SENTENCE[:1], text=text, is_prompt_alone=True))
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (text, "length", [])
        assert len(choice["logprobs"]["tokens"]) == len(PROMPT)


async def _best(num_shown: int) -> list[str]:
    texts = [answer([SENTENCE[n]] * 3) for n in range(4)]
    for text, mean in zip(texts, (-3.0, -1.0, -2.0, -4.0), strict=True):
        text.sequence.logprobs = [TokenLogprobs(mean, 1, [], [])] * 3
    choices = [Choice(str(n), (await text.choice()).finish_reason) for n, text in enumerate(texts)]
    return [choice.text for choice in await told_choices(texts, choices, 4, num_shown)]


async def test_the_best_answers_have_the_likeliest_tokens() -> None:
    assert await _best(2) == ["1", "2"]
    assert await _best(4) == ["0", "1", "2", "3"]
