"""Reads the sampling parameters of a request."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from backend.errors import InvalidRequest
from backend.grammar import Grammar
from backend.sampling_params import SamplingParams
from gateway.errors import BadRequest, translate
from gateway.http.json_body import shown
from gateway.openai.bodies import SamplingBody
from gateway.openai.limits import Limits, check_in_vocabulary, whole_numbers

_SAMPLING_FIELDS = {
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos",
}  # fmt: skip


def sampling_of(
    body: SamplingBody, limits: Limits, max_tokens: int | None, **asked: int | Grammar | None
) -> SamplingParams:
    """The sampling parameters; null means the default, which the model may set.

    `asked` are `logprobs`, `prompt_logprobs` and `grammar`, if requested. `bad_words` are added once they are tokens.
    """
    given = {name: value for name, value in body.items() if name in _SAMPLING_FIELDS and value is not None}
    stop_token_ids = tuple(body.get("stop_token_ids") or ())
    if stop_token_ids:
        check_in_vocabulary(stop_token_ids, "stop_token_ids", limits)
    rare = {**_constraints(body, limits), **{name: value for name, value in asked.items() if value is not None}}
    try:
        sampling = _checked(
            **{**limits.sampling_defaults, **given},
            max_tokens=max_tokens,
            stop=tuple(body.get("stop") or ()),
            stop_token_ids=stop_token_ids,
        )
        if "grammar" in rare and sampling.ignore_eos:
            raise BadRequest("ignore_eos has no meaning for a constrained answer: leave it out.", "ignore_eos")
        return replace(sampling, **rare) if rare else sampling
    except InvalidRequest as exc:
        raise translate(exc) from exc


def _constraints(body: SamplingBody, limits: Limits) -> dict[str, Any]:
    """The constraints on the tokens that may be drawn, if any."""
    constraints: dict[str, Any] = {}
    if bias := body.get("logit_bias"):
        constraints["logit_bias"] = _bias(bias, limits)
    if (allowed := body.get("allowed_token_ids")) is not None:
        constraints["allowed_token_ids"] = _allowed(allowed, limits)
    return constraints


def _bias(bias: dict[str, float], limits: Limits) -> tuple[tuple[int, float], ...]:
    """The biases by token id, ascending. An id must be a canonical decimal number."""
    found: dict[int, float] = {}
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and str(int(name)) == name):
            param = "logit_bias"
            raise BadRequest(f'{param} must map token ids, like "42", to numbers, got {shown(name)}.', param)
        found[int(name)] = value
    check_in_vocabulary(list(found), "logit_bias", limits)
    return tuple(sorted(found.items()))


def _allowed(allowed: Any, limits: Limits) -> tuple[int, ...]:
    param = "allowed_token_ids"
    if not isinstance(allowed, list) or not 1 <= len(allowed) <= limits.vocab_size:
        raise BadRequest(
            f"{param} must be an array of 1 to {limits.vocab_size} token ids, got {shown(allowed)}; leave it out to "
            "allow all.",
            param,
        )
    return tuple(sorted(set(whole_numbers(allowed, param, limits))))


@lru_cache(maxsize=64, typed=True)
def _checked(**fields: Any) -> SamplingParams:
    """Checked parameters, cached: clients seldom change them."""
    return SamplingParams(**fields)
