"""The bounds of the served model, against which requests are checked before any text becomes tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.errors import BadRequest, context_exceeded
from gateway.http.json_body import shown
from gateway.openai.foreign_fields import Ignored

MAX_CUT_CONTEXTS = 4  # maximum length of a prompt that is truncated to its last tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that a request is checked against before it is tokenized, and the model's defaults for sampling."""

    vocab_size: int
    max_model_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams, the model's own
    unknown_fields: Literal["ignore", "refuse"] = "ignore"

    def ignored(self) -> Ignored | None:
        """A new list of ignored fields; None: unknown fields are refused."""
        return Ignored() if self.unknown_fields == "ignore" else None


def token_ids(ids: Any, param: str, limits: Limits, most: int | None = None, least: int = 1) -> tuple[int, ...]:
    """The token ids of a field, at most `most` of them; None: a context of them. Raises `ApiError`."""
    if not isinstance(ids, list) or len(ids) < least:
        kind = "a non-empty array" if least else "an array"
        raise BadRequest(f"{param} must be {kind} of token ids, got {shown(ids)}.", param)
    if not ids:
        return ()
    if len(ids) > (most or limits.max_model_len):
        raise context_exceeded(len(ids), limits.max_model_len, param)
    return tuple(whole_numbers(ids, param, limits))


def whole_numbers(ids: list[Any], param: str, limits: Limits) -> list[int]:
    """The same list, checked to hold ids of the vocabulary only. Raises `BadRequest`."""
    if not all(type(token_id) is int for token_id in ids):
        raise BadRequest(f"{param} must hold only integers.", param)
    check_in_vocabulary(ids, param, limits)
    return ids


def check_in_vocabulary(ids: Sequence[int], param: str, limits: Limits) -> None:
    for outlier in (min(ids), max(ids)):
        if not 0 <= outlier < limits.vocab_size:
            raise BadRequest(f"{param} must hold ids between 0 and {limits.vocab_size - 1}, got {outlier}.", param)
