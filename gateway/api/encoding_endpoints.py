"""Answers /v1/embeddings, /v1/score and /v1/rerank: texts become token ids here, and vectors beside the engine."""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import mul
from typing import Any

from admission.outcome import Outcome
from backend.text.tokenizer import INLINE_CHARS
from gateway.api.client_deadlines import read_deadlines
from gateway.api.endpoint import Call, TokensEndpoint
from gateway.api.engine_client import EncodingAsk
from gateway.api.frontend import Frontend, ServedEncoder
from gateway.errors import BadRequest, ModelNotFound, RequestTooLarge
from gateway.http.request_scope import has_come_whole
from gateway.key_mask import masked
from gateway.openai.embeddings import (
    EmbeddingsRequest,
    EncodingParams,
    PairsRequest,
    embeddings_list,
    floats,
    parse_embeddings_request,
    parse_rerank_request,
    parse_score_request,
    ranking,
    scores_list,
)
from gateway.quoting import quoted
from gateway.tenants.effective_policy import EffectivePolicy

MAX_INPUT_CHARS = 2**22  # of all texts of a request
CHARS_PER_TURN = 2**16  # of texts to encode, one longer text excepted
INPUT_CHARS = 64  # of text that are encoded in the time of an input without any
IDS_PER_CHAR = 16  # token ids that are checked in the time of a character
Texts = Sequence[str | tuple[str, str] | tuple[int, ...]]


class EncodingEndpoint(TokensEndpoint):
    """Reads a request, has its inputs encoded in the scope of its connection, and settles what was computed."""

    operation = "embeddings"

    def __init__(self, frontend: Frontend, parse: Callable[..., Any]) -> None:
        super().__init__(frontend)
        self._parse = parse

    async def reply(self, call: Call, request: Any, encoder: ServedEncoder, policy: EffectivePolicy) -> bytes:
        raise NotImplementedError

    async def serve(self, call: Call, policy: EffectivePolicy) -> Outcome:
        frontend, has_come = self.frontend, has_come_whole(call.response.exchange)
        request = await self.read(call, policy, partial(self._parse, limits=frontend.encoding_limits))
        call.record.body_read, call.record.model = frontend.telemetry.clock(), masked(request.params.model)
        if not has_come:
            policy = self.present_policy(call)
        encoder = self._encoder(request.params, policy)
        async with self.scoped(call) as scope:
            self.tell_ignored(call, request.params.ignored)
            await call.response.reply(await self.reply(call, request, encoder, policy))
        return scope.ended()

    def _encoder(self, params: EncodingParams, policy: EffectivePolicy) -> ServedEncoder:
        """The requested encoder. Raises `ModelNotFound`, and `BadRequest` for a model that generates text."""
        policy.check_model(params.model)
        encoder = self.frontend.encoders.get(params.model)
        if encoder is None and self.frontend.generates(params.model):
            raise BadRequest(f"The model {params.model!r} generates text and embeds none: ask for another.", "model")
        if encoder is None:
            known = (
                ", ".join(map(repr, filter(policy.allows_model, self.frontend.encoders)))
                or "none that embeds or scores (--embedding-model)"
            )
            raise ModelNotFound(
                f"The model {quoted(params.model, 200)} does not exist; this server has {known}.", "model"
            )
        return encoder

    async def encode(
        self, call: Call, encoder: ServedEncoder, policy: EffectivePolicy, inputs: list[list[int]], user: str | None
    ) -> list[bytes]:
        """Returns the vector of 32-bit floats of each input. Raises `ApiError`."""
        deadlines = read_deadlines(call.scope["headers"], False, call.record.began_ns / 1e9)
        passed = self.frontend.telemetry.clock() - call.record.began
        within = min(deadlines.first_token, deadlines.last_token) - passed
        service_class = policy.service_class(None).name if policy.is_line else ""
        row = policy.usage_row(encoder.setup.name, service_class, user, {}, call.record.session)
        asked = EncodingAsk(encoder.setup.name, inputs, within, deadlines.is_relative, row)
        headers, vectors = await self.frontend.engine.encode(asked, policy)
        call.response.add_headers(headers)
        return [*vectors]

    async def token_ids(
        self,
        policy: EffectivePolicy,
        params: EncodingParams,
        encoder: ServedEncoder,
        given: Texts,
        fields: Sequence[str],
    ) -> list[list[int]]:
        """Returns the token ids of each input. Raises `ApiError`."""
        size = sum(map(_size, given))
        if size > MAX_INPUT_CHARS:
            raise RequestTooLarge(
                f"The texts have {size} characters, a query counted with each document; at most {MAX_INPUT_CHARS} are "
                "encoded in one request: send fewer or shorter ones."
            )
        encode, found = partial(encoder.token_ids, kept=params.kept_tokens), list[list[int]]()
        costs = [_cost(one, encoder.setup.default_prompt) for one in given]
        if sum(costs) <= INLINE_CHARS:
            return encode(given, params=fields)
        for part in _parts(costs):
            one = partial(encode, given[part], params=fields[part])
            found += await self.frontend.body_reader.encode(policy.name, encoder.tokenizer, one)
        return found


def _parts(costs: Sequence[int]) -> Iterator[slice]:
    """Cut inputs, by their costs in characters, into parts that are encoded at once: between two of them other tenants
    have their turn.
    """
    first, size = 0, 0
    for number, cost in enumerate(costs):
        size += cost
        if size >= CHARS_PER_TURN or number == len(costs) - 1:
            yield slice(first, number + 1)
            first, size = number + 1, 0


def _size(given: str | tuple[str, str] | tuple[int, ...]) -> int:
    """Characters to tokenize, approximately."""
    return len(given) if isinstance(given, str) else sum([len(one) for one in given if isinstance(one, str)])


def _cost(given: str | tuple[str, str] | tuple[int, ...], default_prompt: str) -> int:
    """The characters of text that take as long to encode."""
    ids = 0 if isinstance(given, str) else len(given)
    return INPUT_CHARS + len(default_prompt) + _size(given) + ids // IDS_PER_CHAR


class EmbeddingsEndpoint(EncodingEndpoint):
    async def reply(
        self, call: Call, request: EmbeddingsRequest, encoder: ServedEncoder, policy: EffectivePolicy
    ) -> bytes:
        if encoder.setup.kind != "embed":
            raise BadRequest(f"The model {encoder.setup.name!r} scores pairs of texts: POST /v1/score.", "model")
        most = encoder.setup.dimensions
        if request.dimensions is not None and request.dimensions > most:
            raise BadRequest(
                f"dimensions must be at most {most}, which this model's embeddings have, got {request.dimensions}.",
                "dimensions",
            )
        fields = [f"input[{number}]" for number in range(len(request.inputs))]
        inputs = await self.token_ids(policy, request.params, encoder, request.inputs, fields)
        vectors = await self.encode(call, encoder, policy, inputs, request.params.user)
        num_tokens = sum(map(len, inputs))

        def written() -> bytes:
            cut = vectors if request.dimensions is None else [_shortened(one, request.dimensions) for one in vectors]
            return embeddings_list(encoder.setup.name, cut, request.as_base64, num_tokens)

        return await self.frontend.body_reader.offload(policy.name, 8 * most * len(vectors), written)


class PairsEndpoint(EncodingEndpoint):
    """Scores texts against others: by a model that reads both at once, or by the cosine of two embeddings."""

    async def scores(
        self, call: Call, request: PairsRequest, encoder: ServedEncoder, policy: EffectivePolicy
    ) -> tuple[list[float], int]:
        """Returns the score of each pair, and the number of tokens."""
        texts, fields = request.texts, request.params_of
        if encoder.setup.kind == "score":
            pairs = [(texts[one], texts[other]) for one, other in request.pairs]
            inputs = await self.token_ids(
                policy, request.params, encoder, pairs, [fields[other] for _, other in request.pairs]
            )
            vectors = await self.encode(call, encoder, policy, inputs, request.params.user)
            return [floats(vector)[0] for vector in vectors], sum(map(len, inputs))
        inputs = await self.token_ids(policy, request.params, encoder, texts, fields)
        vectors = await self.encode(call, encoder, policy, inputs, request.params.user)

        def compared() -> list[float]:
            each = [floats(vector) for vector in vectors]
            return [_cosine(each[one], each[other]) for one, other in request.pairs]

        size = 8 * encoder.setup.dimensions * len(vectors)
        return await self.frontend.body_reader.offload(policy.name, size, compared), sum(map(len, inputs))


class ScoreEndpoint(PairsEndpoint):
    operation = "score"

    async def reply(self, call: Call, request: PairsRequest, encoder: ServedEncoder, policy: EffectivePolicy) -> bytes:
        return scores_list(encoder.setup.name, *await self.scores(call, request, encoder, policy))


class RerankEndpoint(PairsEndpoint):
    operation = "rerank"

    async def reply(self, call: Call, request: PairsRequest, encoder: ServedEncoder, policy: EffectivePolicy) -> bytes:
        return ranking(request, *await self.scores(call, request, encoder, policy))


def _shortened(vector: bytes, dimensions: int) -> bytes:
    """Returns the first dimensions of an embedding, of length 1 again (Kusupati et al., Matryoshka, 2022)."""
    kept = floats(vector)[:dimensions]
    norm = math.hypot(*kept) or 1.0
    return array("f", [value / norm for value in kept]).tobytes()


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    norm = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / norm if norm else 0.0


def make_encoding_endpoints(frontend: Frontend) -> dict[str, EncodingEndpoint]:
    """Returns the endpoints by path."""
    embeddings = EmbeddingsEndpoint(frontend, parse_embeddings_request)
    score, rerank = ScoreEndpoint(frontend, parse_score_request), RerankEndpoint(frontend, parse_rerank_request)
    paths: dict[str, EncodingEndpoint] = {"/v1/embeddings": embeddings}
    paths |= dict.fromkeys(("/v1/score", "/score"), score)
    return paths | dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), rerank)
