"""A request to generate text: how its dialect reads it, how long its client will wait, and what it asks the engine for.

The client's patience is read from its headers, of which the tightest holds:

x-sluice-ttft-ms             until the first token              ms from now
x-sluice-deadline-ms         until the last                     ms from now
x-sluice-deadline-at         until the last                     a moment: RFC 3339, or Unix seconds
x-request-timeout-seconds    until the last                     Ray
x-llm-d-slo-ttft-ms          until the first token              llm-d
x-llm-d-slo-tpot-ms          between two tokens                 llm-d
x-stainless-read-timeout     the longest silence, in seconds    openai: an answer in one piece is silent until its last
                                                                token, a stream until its first and between tokens

x-sluice-expect-followup says in how many seconds after the answer the client comes with the next turn.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from math import inf, isfinite
from typing import Any

from gateway.api.engine_request import ClientDeadlines, EngineRequest
from gateway.api.frontend import Frontend, ServedModel
from gateway.errors import BadRequest, ContextLengthExceeded, Unsatisfiable, context_exceeded
from gateway.http.json_body import JsonBody
from gateway.openai.replies import (
    ChatChunks,
    Choice,
    Chunks,
    CompletionChunks,
    Identity,
    TokenUsage,
    chat_completion,
    text_completion,
)
from gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Limits,
    parse_chat_request,
    parse_completion_request,
)
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.policy.policy import ClassPolicy

PROMPT_TAIL = 8  # the last ids of a prompt, with which a completion may share a character
FOLLOWUP, LATEST_FOLLOWUP = b"x-sluice-expect-followup", 3600.0  # seconds
LONGEST = 30 * 86_400.0  # seconds; a longer wait is taken for no deadline
FIRST, LAST, INTERVAL = "first", "last", "interval"
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class Prompt:
    """One prompt as token ids, and the last of them, whose text the answer continues."""

    token_ids: list[int]
    tail: tuple[int, ...] | list[int]


class Dialect:
    """Reads the bodies of one of the API's two ways to generate text, and says how its answers are written."""

    operation: str  # of the GenAI conventions
    prompt_param: str  # the field of the body that holds the prompt
    default_max_tokens: int | None = None  # of an answer for which neither the client nor the operator sets any

    def parse(self, body: JsonBody, limits: Limits) -> GenerationRequest:
        raise NotImplementedError

    async def prompts(self, request: Any, tenant: str, frontend: Frontend) -> list[Prompt]:
        raise NotImplementedError

    def identify(self, model: str) -> Identity:
        raise NotImplementedError

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        raise NotImplementedError

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        raise NotImplementedError

    async def encode(self, frontend: Frontend, tenant: str, text: str, add_special_tokens: bool) -> list[int]:
        """Returns at least one token id. Raises `BadRequest` for a text that has none."""
        token_ids = await frontend.encode(tenant, text, add_special_tokens, self.prompt_param)
        if not token_ids:
            raise BadRequest(f"{self.prompt_param} is empty: there is no token to continue from.", self.prompt_param)
        return token_ids


class ChatDialect(Dialect):
    """A conversation, which an assistant's message answers."""

    operation = "chat"
    prompt_param = "messages"

    def parse(self, body: JsonBody, limits: Limits) -> ChatRequest:
        return parse_chat_request(body, limits)

    async def prompts(self, request: ChatRequest, tenant: str, frontend: Frontend) -> list[Prompt]:
        text = await frontend.render(tenant, request.messages, request.add_generation_prompt)
        return [Prompt(await self.encode(frontend, tenant, text, request.add_special_tokens), ())]

    def identify(self, model: str) -> Identity:
        return Identity.of_chat(model)

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        return ChatChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return chat_completion(identity, choices, usage)


class CompletionDialect(Dialect):
    """Prompts, each of which a text continues."""

    operation = "text_completion"
    prompt_param = "prompt"
    default_max_tokens = 16  # as OpenAI's and vLLM's

    def parse(self, body: JsonBody, limits: Limits) -> CompletionRequest:
        return parse_completion_request(body, limits)

    async def prompts(self, request: CompletionRequest, tenant: str, frontend: Frontend) -> list[Prompt]:
        prompts = []
        for given in request.prompts:
            if isinstance(given, str):
                token_ids = await self.encode(frontend, tenant, given, request.add_special_tokens)
            else:
                token_ids = list(given)
            prompts.append(Prompt(token_ids, token_ids[-PROMPT_TAIL:]))
            await asyncio.sleep(0)  # many short prompts do not hold the loop
        return prompts

    def identify(self, model: str) -> Identity:
        return Identity.of_completion(model)

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        return CompletionChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return text_completion(identity, choices, usage)


@dataclass(slots=True)
class GenerationParams:
    """A request with what its policy and its client's headers say of it. `arrived` is in seconds of the engine's
    clock.
    """

    request: GenerationRequest
    dialect: Dialect
    policy: EffectivePolicy
    service_class: ClassPolicy
    deadlines: ClientDeadlines
    expects_followup: float | None  # seconds after the answer
    arrived: float
    num_bytes: int

    def engine_request(self, name: str, prompts: list[Prompt], model: ServedModel) -> EngineRequest:
        """Returns what the engine is asked for under the response id `name`: an answer to each of `prompts`, of which
        as many in a row are one as the request wants answers to each. Raises `Unsatisfiable`.
        """
        return EngineRequest(
            id=name,
            tenant=self.policy.name,
            key=self.policy.key,
            prompts=[prompt.token_ids for prompt in prompts],
            max_tokens=[self._max_tokens(len(prompt.token_ids), model) for prompt in prompts],
            sampling=self.request.sampling,
            service_tier=self.request.service_tier,
            service_class=self.service_class.name,
            priority_class=self.service_class.level,
            token_interval=self._token_interval(),
            first_token_target=self.service_class.ttft,
            first_token_by=self._first_token_by(),
            done_by=self._moment(self.deadlines.last_token),
            deadlines=self.deadlines,
            body_bytes=self.num_bytes,
            streams=self.request.stream,
            may_stop=bool(self.request.sampling.stop),
            cache_salt=self.request.cache_salt,
            num_answers=self.request.num_answers,
            expects_followup=self.expects_followup,
        )

    def _max_tokens(self, num_prompt_tokens: int, model: ServedModel) -> int:
        """Returns the client's limit, or the default within what the context and the tenant's KV memory leave.

        Raises `Unsatisfiable`.
        """
        policy, dialect, context = self.policy, self.dialect, model.limits.max_model_len
        available = context - num_prompt_tokens
        if available < 1:
            raise context_exceeded(num_prompt_tokens, context, dialect.prompt_param)
        asked, field = self.request.sampling.max_tokens, self.request.length_field
        if asked is not None and asked > available:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context} tokens, but {num_prompt_tokens} tokens of prompt "
                f"and {asked} of {field} were requested; lower {field} to {available} or shorten the prompt.",
                field,
            )
        kv_tokens = policy.kv_tokens(model.kv_shape)
        if kv_tokens is not None:
            policy.check_kv(num_prompt_tokens + (asked or 1), model.kv_shape, field if asked else dialect.prompt_param)
            available = min(available, kv_tokens - num_prompt_tokens)
        default = model.default_max_tokens or dialect.default_max_tokens or available
        max_tokens = asked or min(available, default)
        _check_min_tokens(self.request.sampling.min_tokens, max_tokens)
        return max_tokens

    def _first_token_by(self) -> float | None:
        """Returns the moment by which the first token must come: by the client's deadline, and by the target of a
        class that refuses what would be late. None: there is no such moment.
        """
        seconds, target = self.deadlines.first_token, self.service_class.ttft
        if self.service_class.when_late == "refuse" and target is not None:
            seconds = min(seconds, target)
        return self._moment(seconds)

    def _token_interval(self) -> float | None:
        """Returns the seconds promised between two tokens, by the class or the client; None if neither sets any."""
        promised = self.service_class.time_per_output_token
        if self.deadlines.interval == inf:
            return promised
        return min(self.deadlines.interval, promised or inf)

    def _moment(self, seconds: float) -> float | None:
        return self.arrived + seconds if seconds < inf else None


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise Unsatisfiable(
            f"min_tokens is {min_tokens}, but this answer may have {max_tokens} tokens at most: "
            "lower min_tokens, shorten the prompt, or set max_tokens.",
            "min_tokens",
        )


NONE = ClientDeadlines()


def read_deadlines(headers: Headers, stream: bool, now: float) -> ClientDeadlines:
    """Returns the tightest deadlines of the headers; `now` is in Unix seconds. Raises `BadRequest` for a wrong one."""
    given = [(name, value) for name, value in headers if name in _NAMES]
    return _tightest(given, stream, now) if given else NONE


def read_expected_followup(headers: Headers) -> float | None:
    """Returns in how many seconds after its answer the client says that it comes again; None: it says nothing.

    Raises `BadRequest` where that is no number of seconds, or one of more than an hour.
    """
    given = [value for name, value in headers if name == FOLLOWUP]
    if not given:
        return None
    seconds = _number(given[-1])
    if not 0 < seconds <= LATEST_FOLLOWUP:
        most = f"{LATEST_FOLLOWUP:.0f}"
        raise _wrong(FOLLOWUP, given[-1], f"seconds, a number above 0 and at most {most}; leave it out if none follows")
    return seconds


def _tightest(headers: Headers, stream: bool, now: float) -> ClientDeadlines:
    tightest = {FIRST: inf, LAST: inf, INTERVAL: inf}
    absolute = inf
    for name, value in headers:
        if name == b"x-stainless-read-timeout":
            seconds = _duration(name, value, 1.0)
            for what in (FIRST, INTERVAL) if stream else (LAST,):
                tightest[what] = min(tightest[what], seconds)
        elif name == b"x-sluice-deadline-at":
            absolute = _until(name, value, now)
        else:
            what, unit = _DURATIONS[name]
            tightest[what] = min(tightest[what], _duration(name, value, unit))
    is_relative = absolute >= tightest[LAST]
    return ClientDeadlines(tightest[FIRST], min(tightest[LAST], absolute), tightest[INTERVAL], is_relative)


_DURATIONS = {
    b"x-sluice-ttft-ms": (FIRST, 1e-3),
    b"x-sluice-deadline-ms": (LAST, 1e-3),
    b"x-request-timeout-seconds": (LAST, 1.0),
    b"x-llm-d-slo-ttft-ms": (FIRST, 1e-3),
    b"x-llm-d-slo-tpot-ms": (INTERVAL, 1e-3),
}


_NAMES = {*_DURATIONS, b"x-sluice-deadline-at", b"x-stainless-read-timeout"}


def _duration(name: bytes, value: bytes, unit: float) -> float:
    seconds = _number(value) * unit
    if not seconds > 0:
        raise _wrong(name, value, "a number above 0")
    return seconds if seconds <= LONGEST else inf


def _until(name: bytes, value: bytes, now: float) -> float:
    seconds = _unix(value) - now
    if not isfinite(seconds):
        raise _wrong(name, value, "a moment such as 2027-01-31T12:00:00Z, or Unix seconds")
    return max(seconds, 0.0) if seconds <= LONGEST else inf


def _unix(value: bytes) -> float:
    number = _number(value)
    if isfinite(number):
        return number
    try:
        moment = datetime.fromisoformat(value.decode("ascii"))
    except ValueError:
        return inf
    return moment.timestamp() if moment.tzinfo else inf


def _number(value: bytes) -> float:
    """Returns the number, or NaN for a value that is no plain finite one."""
    text = value.strip()
    is_plain = len(text) <= 32 and text.replace(b".", b"", 1).isdigit()
    return float(text) if is_plain else float("nan")


def _wrong(name: bytes, value: bytes, expected: str) -> BadRequest:
    header = name.decode()
    return BadRequest(f"The header {header} must be {expected}, got {value[:64].decode('latin-1')!r}.", header)
