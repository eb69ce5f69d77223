"""The half of the gateway that speaks HTTP: it reads requests and writes their answers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import orjson

from backend.errors import InvalidRequest, TooManyTokens
from backend.sampling_params import MAX_BAD_WORD_TOKENS
from backend.text.tokenizer import INLINE_CHARS, Tokenizer
from gateway.api.body_reader import BodyReader
from gateway.api.engine_client import EngineClient
from gateway.api.guardrail import Guardrails
from gateway.batches.file_bytes import FileBytes
from gateway.errors import BadRequest, ContextLengthExceeded, ModelNotFound, context_exceeded
from gateway.http.cors import Cors
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import ActiveRequests
from gateway.openai.conversation import Conversation
from gateway.openai.limits import MAX_CUT_CONTEXTS, Limits, check_in_vocabulary
from gateway.quoting import quoted
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.request_record import Telemetry
from gateway.tenants.auth import KeyRing, Principal
from gateway.tenants.effective_policy import EffectivePolicies, EffectivePolicy, KVShape
from gateway.tenants.sealer import Sealer

BYTES_PER_TOKEN = 8  # of text that render in the time of decoding a token
WORD_BYTES = 64  # of text that render in the time of encoding a word

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the API, as its clients see it."""

    name: str  # the served name
    created: int  # Unix seconds
    limits: Limits
    default_max_tokens: int | None
    end_tokens: frozenset[int]
    tool_followup: float | None  # seconds from an answer with tools to its expected follow-up
    kv_shape: KVShape
    has_grammars: bool = False  # structured output is available
    clamps_max_tokens: bool = True  # to the rest of the context


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """An adapter as clients see it."""

    name: str
    model: str  # the name of its model
    created: int  # Unix seconds
    kv_blocks: int  # that it takes of its tenant's KV memory


@dataclass(frozen=True, slots=True)
class EncoderSetup:
    """A model that embeds texts or scores pairs of them, as its clients see it."""

    name: str
    directory: Path
    created: int  # Unix seconds
    kind: Literal["embed", "score"]
    dimensions: int
    max_tokens: int  # of an input
    vocab_size: int
    default_prompt: str = ""  # before each text to embed


@dataclass(frozen=True, slots=True)
class ServedEncoder:
    """A model that embeds texts or scores pairs of them, with its tokenizer."""

    setup: EncoderSetup
    tokenizer: Tokenizer

    def token_ids(
        self, inputs: Sequence[str | tuple[str, str] | tuple[int, ...]], kept: int | None, params: Sequence[str]
    ) -> list[list[int]]:
        """The token ids of texts, pairs of texts, or token ids. A longer input is cut to its first `kept` tokens, -1
        for the model's maximum. `params` are the fields of the inputs. Raises `BadRequest`, as `ContextLengthExceeded`
        for an input that is too long.
        """
        context = self.setup.max_tokens
        most = context if kept is None or kept < 0 else min(kept, context)
        before = self.setup.default_prompt
        texts = [before + one if isinstance(one, str) else one for one in inputs if _is_text(one)]
        encoded = iter(self._encoded(texts, most))  # type: ignore[arg-type]
        found: list[list[int]] = []
        for given, param in zip(inputs, params, strict=True):
            if _is_text(given):
                ids, is_whole = next(encoded)
            else:
                ids, is_whole = list(given), True  # type: ignore[arg-type]
                check_in_vocabulary(ids, param, Limits(self.setup.vocab_size, context))
            if not ids:
                raise BadRequest(f"{param} is empty: there is no token to encode.", param)
            if kept is None and len(ids) > most:
                count = f"{'' if is_whole else 'at least '}{len(ids)}"
                raise ContextLengthExceeded(
                    f"This model reads {context} tokens of an input, and {param} holds {count}: shorten it, or send "
                    "truncate_prompt_tokens = -1.",
                    param,
                )
            found.append(ids if len(ids) <= most else self._cut(ids, most))
        return found

    def _encoded(self, texts: Sequence[str | tuple[str, str]], most: int) -> list[tuple[list[int], bool]]:
        """The token ids of texts and pairs, and whether they are all: of one with more than `most` those of a beginning
        will do, since megabytes take seconds.
        """
        beginnings = [self._beginning(one, most) for one in texts]
        found = [(ids, True) for ids in self.tokenizer.encode_inputs(beginnings)]
        for number, (beginning, whole) in enumerate(zip(beginnings, texts, strict=True)):
            if beginning != whole:
                if len(found[number][0]) > most:
                    found[number] = found[number][0], False
                else:  # such as spaces, which are no tokens
                    found[number] = self.tokenizer.encode_inputs([whole])[0], True
        return found

    def _beginning(self, given: str | tuple[str, str], most: int) -> str | tuple[str, str]:
        if isinstance(given, str):
            return self.tokenizer.beginning(given, most)
        return self.tokenizer.beginning(given[0], most), self.tokenizer.beginning(given[1], most)

    def _cut(self, ids: list[int], most: int) -> list[int]:
        """Returns the first `most` token ids of a longer input, with the special tokens that close it."""
        closing = ids[len(ids) - self.tokenizer.num_closing :]
        return ids[: max(0, most - len(closing))] + closing[:most]


def _is_text(given: str | tuple[str, str] | tuple[int, ...]) -> bool:
    return isinstance(given, str) or isinstance(given[0], str)


def served_encoders(models: Iterable[tuple[EncoderSetup, Tokenizer]]) -> dict[str, ServedEncoder]:
    """The models by name. Their tokenizers read the spelling of a special token as plain text from now on."""
    served: dict[str, ServedEncoder] = {}
    for setup, tokenizer in models:
        tokenizer.take_special_tokens_as_text()
        served[setup.name] = ServedEncoder(setup, tokenizer)
    return served


def longest_context(first: ServedModel, others: Mapping[str, tuple[ServedModel, Tokenizer]]) -> int:
    """The tokens of the longest context of all models."""
    return max([first.limits.max_model_len, *(one.limits.max_model_len for one, _ in others.values())])


@dataclass(frozen=True, slots=True)
class Frontend:
    """One model behind one engine, which may run in another process and is reached through `engine`; with several
    models the first, and `of` is the frontend of another.
    """

    model: ServedModel
    tokenizer: Tokenizer
    keys: KeyRing
    effective_policies: EffectivePolicies
    telemetry: Telemetry
    deliveries: DeliveryMetrics
    active_requests: ActiveRequests
    body_reader: BodyReader
    engine: EngineClient
    sealer: Sealer
    files: FileBytes
    guardrails: Guardrails
    encoders: Mapping[str, ServedEncoder] = field(default_factory=dict)  # by name
    adapters: Mapping[str, AdapterCard] = field(default_factory=dict)  # by name, as they are loaded now
    others: Mapping[str, tuple[ServedModel, Tokenizer]] = field(default_factory=dict)  # further models, by name
    cors: Cors | None = None  # None: no web page of another origin may call
    public_models: bool = False  # /v1/models needs no key

    @property
    def encoding_limits(self) -> Limits:
        """The bounds of requests to encode: the loosest of all encoders."""
        most = max([one.setup.max_tokens for one in self.encoders.values()], default=1)
        return Limits(2**31, MAX_CUT_CONTEXTS * most, unknown_fields=self.model.limits.unknown_fields)

    def policy(self, principal: Principal, scope: str) -> EffectivePolicy:
        """The present policy of a key. Raises `Forbidden` if the key lacks `scope`."""
        policy = self.effective_policies.of(principal)
        policy.require(scope)
        return policy

    def of(self, name: str | None) -> "Frontend":
        """The frontend of the model of that name, or of that adapter's model; this one for any other name."""
        card = self.adapters.get(name or "")
        if (found := self.others.get(card.model if card else name or "")) is None:
            return self
        return replace(self, model=found[0], tokenizer=found[1])

    def first_of(self, name: str | None) -> str | None:
        """The model that an alias names first; any other name as it is."""
        aliased = self.effective_policies.aliases.get(name or "")
        return aliased[0].model if aliased else name

    def model_in(self, body: JsonBody) -> str | None:
        """The model that a body names, by whose limits it is parsed; None where there is but one."""
        if not (self.others or self.effective_policies.aliases):
            return None
        try:
            given = orjson.loads(body.raw)
        except orjson.JSONDecodeError:
            return None
        model = given.get("model") if isinstance(given, dict) else None
        return model if isinstance(model, str) else None

    def check_model(self, model: str | None, policy: EffectivePolicy | None) -> None:
        """Raise `ModelNotFound` for a model that is not served, or that the tenant may not use, and `BadRequest` for
        one that generates no text.

        A `model` of None is the served one; without a `policy` the caller may know every model.
        """
        if model is not None and policy is not None:
            policy.check_model(model)
        if model == self.model.name or (model is not None and (model in self.adapters or model in self.others)):
            return
        if model in self.encoders:
            raise BadRequest(
                f"The model {model!r} embeds or scores texts and generates none: ask for another.", "model"
            )
        is_known = policy is None or policy.allows_model(self.model.name)
        if model is not None:
            known = [one for one in (self.model.name, *self.others) if policy is None or policy.allows_model(one)]
            rest = f"; this server has {', '.join(map(repr, known))}" if is_known else " or you have no access to it"
            raise ModelNotFound(f"The model {quoted(model, 200)} does not exist{rest}.", "model")
        if not is_known:
            raise ModelNotFound("This server has no model that you have access to.", "model")

    def generates(self, name: str) -> bool:
        """True of a model, an adapter or an alias that generates text."""
        named = (self.others, self.adapters, self.effective_policies.aliases)
        return name == self.model.name or any(name in names for names in named)

    def adapter_of(self, model: str | None, policy: EffectivePolicy, is_aliased: bool = False) -> AdapterCard | None:
        """Return the adapter of a request for `model`: the one of that name or, for a model, the tenant's default if it
        is one of that model; None: the model alone. A model that `is_aliased` need not be allowed by its name. Raises
        `ModelNotFound`.
        """
        self.check_model(model, None if is_aliased else policy)
        if model is not None and model in self.adapters:
            return self.adapters[model]
        if (name := policy.tenant.default_adapter) is None:
            return None
        card = self.adapters.get(name)
        if card is None:  # perhaps of this model
            raise ModelNotFound(f"The adapter {quoted(name, 200)}, your tenant's default, is not loaded.", "model")
        return card if card.model == (model or self.model.name) else None

    async def render(self, tenant: str, conversation: Conversation, is_cut: bool = False) -> str:
        """Returns the prompt text of a conversation, which is truncated afterwards if `is_cut`.

        To render megabytes holds the interpreter for tenths of a second: a text that no context holds is found out by
        rendering its beginning.
        """
        context, size = self.model.limits.max_model_len, conversation.size
        most = MAX_CUT_CONTEXTS * context if is_cut else context
        most_chars = self.tokenizer.most_chars(most + 1)

        def rendered() -> str:
            short = conversation.shortened(most_chars) if size > most_chars else None
            if short is not None:
                with suppress(InvalidRequest):
                    if (fewest := self.tokenizer.fewest_tokens(short.render(self.tokenizer))) > most:
                        param = conversation.prompt_field or "messages"
                        raise context_exceeded(fewest, context, param, at_least=True)
            return conversation.render(self.tokenizer)

        return await self.body_reader.offload(tenant, size, rendered)

    async def encode(
        self, tenant: str, text: str, add_special_tokens: bool, param: str, is_cut: bool = False
    ) -> list[int]:
        """Return token ids, at most a context of them, or `MAX_CUT_CONTEXTS` contexts of a text that is truncated
        afterwards (`is_cut`).

        A longer text is refused before any time is spent on it. A tenant encodes one long text at a time, so that a
        thread stays free for other tenants.
        """
        context = self.model.limits.max_model_len
        most = MAX_CUT_CONTEXTS * context if is_cut else context
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > most:
            raise context_exceeded(fewest, context, param, at_least=True)
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode_text(text, add_special_tokens)
        try:
            encode = partial(self.tokenizer.encode_text, text, add_special_tokens, most)
            return await self.body_reader.encode(tenant, self.tokenizer, encode)
        except TooManyTokens as error:
            raise context_exceeded(error.num_tokens, context, param, error.at_least) from None

    async def decode(self, tenant: str, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of token ids."""
        return await self._of_each(tenant, token_ids, lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    async def spellings(self, tenant: str, token_ids: Sequence[int]) -> list[str | None]:
        """Returns each token as the vocabulary spells it."""
        return await self._of_each(tenant, token_ids, lambda: list(map(self.tokenizer.id_to_token, token_ids)))

    async def _of_each(self, tenant: str, token_ids: Sequence[int], found: Callable[[], T]) -> T:
        return await self.body_reader.offload(tenant, BYTES_PER_TOKEN * len(token_ids), found)

    async def bad_words(self, tenant: str, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of bad words: of each at the beginning of a text and, if that differs in the first token only,
        behind a space, as in vLLM. Raises `BadRequest`.
        """
        size = WORD_BYTES * len(words) + sum(map(len, words))
        return await self.body_reader.offload(tenant, size, lambda: tuple(_bad_words(self.tokenizer, words)))


def _bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
    for index, word in enumerate(words):
        first, inner = (tokenizer.encode_text(before + word.lstrip(), add_special_tokens=False) for before in ("", " "))
        if not 1 <= len(first) <= MAX_BAD_WORD_TOKENS:
            param = f"bad_words[{index}]"
            raise BadRequest(f"{param} must be 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(first)}.", param)
        yield tuple(first)
        if inner[0] != first[0] and len(inner) == len(first):
            yield tuple(inner)
