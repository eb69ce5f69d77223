"""The text of an answer with details of its tokens: log probabilities, token ids, the prompt.

Requests without details do not come here.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import orjson

from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.sequence import FinishReason
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from backend.text.tokenizer import Tokenizer
from gateway.api.choice_writer import ChoiceWriter, Progress
from gateway.api.dialects import Dialect, Prompt
from gateway.api.engine_client import Generation
from gateway.api.text_stream import TextStream
from gateway.http.responses import ResponseWriter
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.logprobs import Spelling, ToldToken, prompt_logprobs
from gateway.openai.replies import Choice, Ending, StreamEncoder
from gateway.openai.requests import GenerationRequest
from gateway.telemetry.metrics.delivery import DeliveryMetrics

TOKENS_PER_SLICE = 64  # tokens whose log probabilities are made JSON at once: with 20 each, in about a millisecond

Members = dict[str, Any]
Arrays = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Telling:
    """The details of tokens that one request asks for, and how they are written."""

    request: GenerationRequest
    dialect: Dialect
    tokenizer: Tokenizer
    spelling: Spelling

    @staticmethod
    def of(request: GenerationRequest, dialect: Dialect, tokenizer: Tokenizer) -> "Telling":
        return Telling(request, dialect, tokenizer, Spelling(tokenizer, request.details.as_ids))

    def members(self, tokens: Sequence[ToldToken]) -> Members:
        """Members of a choice: the log probabilities of these tokens, if the request asks for them."""
        top = self.request.details.top
        if top is None:
            return {}
        return {"logprobs": {**self.dialect.logprobs(tokens, self.spelling, top), **self.dialect.no_logprobs}}

    async def all_members(self, tokens: Sequence[ToldToken]) -> Members:
        """As `members`, made in slices between which the event loop runs other callbacks."""
        top = self.request.details.top
        if top is None:
            return {}
        arrays = await _in_slices(tokens, lambda some: self.dialect.logprobs(some, self.spelling, top))
        return {"logprobs": arrays | dict(self.dialect.no_logprobs)}

    async def of_prompt(self, tokens: Sequence[ToldToken]) -> Members:
        """Members that describe the prompt's tokens."""
        details, told = self.request.details, Members()
        if details.top_of_prompt is not None:
            top = details.top_of_prompt
            told |= await _in_slices(tokens, lambda some: prompt_logprobs(some, self.spelling, top))
        if details.ids:
            told["prompt_token_ids"] = [token.token_id for token in tokens]
        return told


async def _in_slices(tokens: Sequence[ToldToken], make: Callable[[Sequence[ToldToken]], Arrays]) -> Members:
    """Encode tokens as JSON arrays, a slice at a time, yielding to the event loop between slices."""
    arrays: dict[str, list[bytes]] = {}
    for start in range(0, max(len(tokens), 1), TOKENS_PER_SLICE):
        for name, array in make(tokens[start : start + TOKENS_PER_SLICE]).items():
            arrays.setdefault(name, []).append(orjson.dumps(array)[1:-1])
        await asyncio.sleep(0)
    return {name: orjson.Fragment(b"[%b]" % b",".join(filter(None, parts))) for name, parts in arrays.items()}


class DetailedText(TextStream):
    """Yields the text of one sequence, with the offset of each token in it.

    Details cover the delivered tokens, special ones and parts of characters included, up to a stop string; a token that
    begins behind the stop string is left out. While a stop string may still remove text, its tokens are held back.
    """

    def __init__(
        self,
        tokens: TokenStream,
        detokenizer: IncrementalDetokenizer,
        generation: Generation,
        deliveries: DeliveryMetrics,
        telling: Telling,
        prompt: Prompt,
        message: AnswerMessage | None = None,
    ) -> None:
        super().__init__(tokens, detokenizer, generation, deliveries, message)
        request = telling.request
        self.telling = telling
        self.prompt = prompt
        self.may_stop = self.may_stop or request.is_prompt_alone
        self._finds_stops = detokenizer.may_stop
        if message is not None and telling.dialect.tells_content_alone:
            message.are_content = []
        base, in_message = len(prompt.text or ""), message is not None
        self._starts = _Starts(
            telling.tokenizer,
            request.skip_special_tokens,
            prompt.tail,
            base,
            in_message=in_message,
            keeps_spaces=request.keeps_spaces,
        )
        self._num_chars = 0  # of its text so far
        self._num_told = self._num_named = 0

    def push(self, tokens: list[int]) -> list[str]:
        if self.telling.request.is_prompt_alone:
            if tokens:
                self.finish_reason = FinishReason.LENGTH
                self._generation.stop(self.tokens, 0)
            return []
        before = self.num_tokens
        pieces = super().push(tokens)
        self._starts.push(tokens[: self.num_tokens - before])
        self._num_chars += sum(map(len, pieces))
        return pieces

    def told(self) -> list[ToldToken]:
        """Returns the tokens that were not returned yet and are certain to be part of the text."""
        starts, first, last = self._starts.starts, self._num_told, self._num_told
        if not self._finds_stops or (self.finish_reason is not None and self._detokenizer.stopped is None):
            last = len(starts)
        else:
            end = self._num_chars + self._starts.base
            while last < len(starts) and starts[last] < end:
                last += 1
        self._num_told = last
        told = self._tokens(self.sequence.output, self.sequence.logprobs, starts, first, last)
        if self.message is None or self.message.are_content is None:
            return told
        return [*compress(told, self.message.are_content[first:last])]

    def new_ids(self) -> list[int]:
        """Returns the ids of the tokens that were delivered since the last call."""
        first, self._num_named = self._num_named, self.num_tokens
        return self.sequence.output[first : self.num_tokens]

    async def told_of_prompt(self) -> list[ToldToken]:
        """Returns the prompt's tokens, once the first of the answer is here."""
        token_ids, text = self.prompt.token_ids, self.prompt.text
        skips = text is None or len(self.telling.tokenizer.decode(token_ids, skip_special_tokens=False)) != len(text)
        starts = _Starts(self.telling.tokenizer, skips, (), 0)
        for start in range(0, len(token_ids), 16 * TOKENS_PER_SLICE):
            starts.push(token_ids[start : start + 16 * TOKENS_PER_SLICE])
            await asyncio.sleep(0)
        computed = self.sequence.prompt_logprobs
        logprobs = None if computed is None else [None, *computed]
        end = 0 if text is None else len(text)
        return self._tokens(token_ids, logprobs, [min(at, end) for at in starts.starts], 0, len(token_ids))

    async def choice(self) -> Choice:
        choice = await super().choice()
        if self.prompt.text is not None:
            choice.text = self.prompt.text + choice.text
        return choice

    async def tell(self, choice: Choice, told_of_prompt: Mapping[str, Any] | None = None) -> None:
        """Add the details of its tokens to a complete choice; `told_of_prompt` are those of another choice of the same
        prompt.
        """
        telling, details = self.telling, self.telling.request.details
        tokens, prompt = self.told(), list[ToldToken]()
        if told_of_prompt is None or (self.prompt.text is not None and details.top is not None):
            prompt = await self.told_of_prompt()
        if self.prompt.text is not None:
            tokens = prompt + tokens
        told = await telling.all_members(tokens)
        if details.ids:
            told["token_ids"] = self.new_ids()
        choice.told = told
        choice.told_of_prompt = await telling.of_prompt(prompt) if told_of_prompt is None else told_of_prompt

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of a complete answer's tokens."""
        logprobs = (self.sequence.logprobs or [])[: self.num_tokens]
        return sum(max(one.logprob, -1e4) for one in logprobs) / max(len(logprobs), 1)

    def _keep(self, tokens: list[int]) -> None:
        super()._keep(tokens)
        self._starts.push(tokens)

    def _finish(self) -> str:
        rest = super()._finish()
        self._num_chars += len(rest)
        return rest

    def _tokens(
        self,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs | None] | None,
        starts: list[int],
        first: int,
        last: int,
    ) -> list[ToldToken]:
        known = [None] * (last - first) if logprobs is None else logprobs[first:last]
        return [ToldToken(*one) for one in zip(token_ids[first:last], starts[first:last], known, strict=True)]


async def told_choices(
    texts: Sequence[TextStream], choices: list[Choice], num_answers: int, num_shown: int
) -> list[Choice]:
    """The choices to send, with their details: all in order, or of each prompt's `num_answers` consecutive choices the
    `num_shown` with the highest mean log probability, best first.
    """
    shown: list[Choice] = []
    for first in range(0, len(choices), num_answers):
        answers = [
            (text, choice)
            for text, choice in zip(texts[first : first + num_answers], choices[first:], strict=False)
            if isinstance(text, DetailedText)
        ]
        if num_shown < num_answers:
            answers.sort(key=lambda answer: -answer[0].mean_logprob)
        of_prompt: Mapping[str, Any] | None = None
        for text, choice in answers[:num_shown]:
            await text.tell(choice, of_prompt)
            of_prompt = choice.told_of_prompt
            shown.append(choice)
    return shown


class _Starts:
    """Finds out where in a text each token begins."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        tail: Sequence[int],
        base: int,
        *,
        in_message: bool = False,
        keeps_spaces: bool = False,
    ) -> None:
        """`in_message`: special tokens that delimit the parts of a message have text, see `IncrementalDetokenizer`."""
        self.starts: list[int] = []
        self.base = base  # characters before the first token
        self._at = base
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            prompt_tail=tail,
            in_message=in_message,
            keeps_spaces=keeps_spaces,
        )

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.starts.append(self._at)
            self._at += len(self._detokenizer.push((token_id,)))


class DetailedChoiceWriter(ChoiceWriter):
    """Writes one choice's events, each with the details of its tokens. An echoed prompt comes first, in several events
    where it has many log probabilities.
    """

    __slots__ = ("_detailed", "_is_begun")

    def __init__(
        self,
        response: ResponseWriter,
        text: DetailedText,
        chunks: StreamEncoder,
        continuous_usage: bool,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(response, text, chunks, continuous_usage, progress)
        self._detailed = text
        self._is_begun = False

    def _start(self) -> bytes:
        ids = self._detailed.prompt.token_ids if self._detailed.telling.request.details.ids else None
        return self._chunks.start(self._usage, None if ids is None else {"prompt_token_ids": ids})

    async def _next_events(self, receiver: Callable[[], bool] | None) -> bytes:
        pieces = await self._detailed.pieces(receiver)
        if not self._is_begun:
            self._is_begun = True
            if self._detailed.prompt.text is not None:
                await self._write_prompt(self._detailed.prompt.text)
        return self._events(pieces)

    async def _write_prompt(self, text: str) -> None:
        telling = self._detailed.telling
        tokens = [] if telling.request.details.top is None else await self._detailed.told_of_prompt()
        for start in range(0, max(len(tokens), 1), TOKENS_PER_SLICE):
            told = telling.members(tokens[start : start + TOKENS_PER_SLICE])
            await self._response.stream(self._chunks.text("" if start else text, self._usage, told))

    def _events(self, pieces: list[str]) -> bytes:
        if not pieces:
            return b""
        if self._usage is not None:
            self._note_usage(self._usage)
        return self._chunks.text("".join(pieces), self._usage, self._told())

    def _finish(self) -> bytes:
        return self._chunks.finish(Ending(self._text.told_reason, self._usage, self._told(), self._text.stop_string))

    def _told(self) -> Members:
        """Details of the tokens since the last event; null while none is certain."""
        detailed = self._detailed
        tokens = detailed.told()
        told = detailed.telling.members(tokens) if tokens else Members()
        if detailed.telling.request.details.ids:
            told["token_ids"] = detailed.new_ids()
        return told
