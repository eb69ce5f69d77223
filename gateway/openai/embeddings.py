"""Embeddings, scores and rankings: the bodies of requests, as OpenAI's, Cohere's, Jina's and vLLM's clients send them,
and the replies.
"""

import time
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import urandom
from typing import Annotated, Any, Literal, Required

import orjson
from pydantic import AfterValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, BodyType, JsonBody, shown
from gateway.openai.bodies import PositiveInt
from gateway.openai.foreign_fields import Ignored, Values, known_object
from gateway.openai.limits import Limits, token_ids

MAX_INPUTS = 2048  # of one request

Input = str | tuple[int, ...]

_IGNORABLE: Mapping[str, Values] = {
    **dict.fromkeys(("input_type", "late_chunking", "max_chunks_per_doc", "priority", "task", "truncate"), ()),
    "embedding_types": (["float"],), "normalized": (True,),
}  # fmt: skip


def _not_zero(kept: int) -> int:
    if kept == 0:
        raise PydanticCustomError("kept", "must be at least 1, or -1 for the model's maximum, got 0")
    return kept


_Kept = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]


@with_config(EXACT)
class EmbeddingsBody(TypedDict, total=False):
    model: Required[str]
    input: Required[Any]
    encoding_format: Literal["float", "base64"] | None
    dimensions: PositiveInt | None
    user: str | None
    truncate_prompt_tokens: _Kept | None  # vLLM's


@with_config(EXACT)
class ScoreBody(TypedDict, total=False):
    model: Required[str]
    text_1: Required[Any]
    text_2: Required[Any]
    user: str | None
    truncate_prompt_tokens: _Kept | None


@with_config(EXACT)
class RerankBody(TypedDict, total=False):
    model: Required[str]
    query: Required[str]
    documents: Required[list[Any]]
    top_n: PositiveInt | None
    return_documents: bool | None
    user: str | None
    truncate_prompt_tokens: _Kept | None
    max_tokens_per_doc: PositiveInt | None


_EMBEDDINGS = BodyType[EmbeddingsBody](EmbeddingsBody, known_object(EmbeddingsBody, ignorable=_IGNORABLE))
_SCORE = BodyType[ScoreBody](ScoreBody, known_object(ScoreBody, ignorable=_IGNORABLE))
_RERANK = BodyType[RerankBody](RerankBody, known_object(RerankBody, ignorable=_IGNORABLE))


@dataclass(frozen=True, slots=True)
class EncodingParams:
    """The fields that all these requests share. `kept_tokens` of each input, from its beginning; -1: the model's
    maximum; None: a longer input is refused.
    """

    model: str
    kept_tokens: int | None
    user: str | None
    ignored: Ignored | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    params: EncodingParams
    inputs: tuple[Input, ...]
    as_base64: bool
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class PairsRequest:
    """Texts to be scored against others: `pairs[n]` by their places in `texts`."""

    params: EncodingParams
    texts: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    params_of: tuple[str, ...]  # the field of each text
    num_shown: int
    shows_documents: bool


def parse_embeddings_request(raw: JsonBody, limits: Limits) -> EmbeddingsRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = _EMBEDDINGS.read(raw, ignored := limits.ignored())
    inputs = _inputs(body["input"], limits)
    is_base64 = body.get("encoding_format") == "base64"
    return EmbeddingsRequest(_params(body, ignored), inputs, is_base64, body.get("dimensions"))


def parse_score_request(raw: JsonBody, limits: Limits) -> PairsRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = _SCORE.read(raw, ignored := limits.ignored())
    first, second = (_texts(body[name], name) for name in ("text_1", "text_2"))
    if len(first) not in (1, len(second)):
        raise BadRequest(
            f"text_1 must be one text, or as many as text_2 has, which are {len(second)}, got {len(first)}.", "text_1"
        )
    pairs = tuple([(n if len(first) > 1 else 0, len(first) + n) for n in range(len(second))])
    places = (*["text_1"] * len(first), *["text_2"] * len(second))
    return PairsRequest(_params(body, ignored), (*first, *second), pairs, places, len(pairs), shows_documents=False)


def parse_rerank_request(raw: JsonBody, limits: Limits) -> PairsRequest:
    """Parse any body. Raises `ApiError`, and nothing else."""
    body = _RERANK.read(raw, ignored := limits.ignored())
    given = [one.get("text") if isinstance(one, dict) else one for one in body["documents"]]
    documents = _texts(given, "documents")
    most = body.get("top_n") or len(documents)
    places = ("query", *[f"documents[{n}]" for n in range(len(documents))])
    pairs = tuple([(0, 1 + n) for n in range(len(documents))])
    shows = body.get("return_documents") is not False
    kept = body.get("truncate_prompt_tokens") or body.get("max_tokens_per_doc")
    params = EncodingParams(body["model"], kept, body.get("user"), ignored)
    return PairsRequest(params, (body["query"], *documents), pairs, places, min(most, len(documents)), shows)


def _params(body: EmbeddingsBody | ScoreBody, ignored: Ignored | None) -> EncodingParams:
    return EncodingParams(body["model"], body.get("truncate_prompt_tokens"), body.get("user"), ignored)


def _inputs(given: Any, limits: Limits) -> tuple[Input, ...]:
    """Returns the inputs: texts, or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        wanted = f"a string, an array of token ids, or an array of 1 to {MAX_INPUTS} of these"
        raise BadRequest(f"input must be {wanted}, got {shown(given)}.", "input")
    inputs: list[Input] = []
    for index, one in enumerate(given):
        if isinstance(one, str):
            inputs.append(one)
        elif isinstance(one, list):
            inputs.append(token_ids(one, f"input[{index}]", limits))
        else:
            param = f"input[{index}]"
            raise BadRequest(f"{param} must be a string or an array of token ids, got {shown(one)}.", param)
    return tuple(inputs)


def _texts(given: Any, param: str) -> list[str]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        raise BadRequest(
            f"{param} must be a string, or an array of 1 to {MAX_INPUTS} strings, got {shown(given)}.", param
        )
    for index, one in enumerate(given):
        if not isinstance(one, str):
            raise BadRequest(f"{param}[{index}] must be a string, got {shown(one)}.", f"{param}[{index}]")
    return given


def floats(vector: bytes) -> list[float]:
    """The numbers of a vector of 32-bit floats."""
    return array("f", vector).tolist()


def embeddings_list(model: str, vectors: Sequence[bytes], as_base64: bool, num_tokens: int) -> bytes:
    """Returns the body that answers /v1/embeddings. `vectors`: of 32-bit floats, by input."""
    told = [b64encode(vector).decode() if as_base64 else floats(vector) for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(told)]
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": _usage(num_tokens)})


def scores_list(model: str, scores: Sequence[float], num_tokens: int) -> bytes:
    """Returns the body that answers /v1/score, as vLLM's does."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{urandom(16).hex()}", "object": "list", "created": int(time.time()), "model": model}
    return orjson.dumps({**head, "data": data, "usage": _usage(num_tokens)})


def ranking(request: PairsRequest, scores: Sequence[float], num_tokens: int) -> bytes:
    """Returns the body that answers /v1/rerank, as Jina's and vLLM's do: the highest scores first."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.num_shown]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if request.shows_documents:
        for one in results:
            one["document"] = {"text": request.texts[1 + one["index"]]}
    head = {"id": f"rerank-{urandom(16).hex()}", "model": request.params.model}
    return orjson.dumps({**head, "usage": _usage(num_tokens), "results": results})


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
