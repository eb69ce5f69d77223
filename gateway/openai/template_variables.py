"""A request's inputs to the chat template beside its messages: documents, variables, reasoning effort."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from backend.text.chat_template import ChatTemplate
from gateway.errors import BadRequest
from gateway.openai.foreign_fields import Ignored
from quotas.policy.units import show_size

MAX_DOCUMENTS = 128
MAX_KWARGS = 16
MAX_KWARGS_BYTES = 2**16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_OWN_FIELDS = {  # of a request, by the template's name
    "messages": "messages", "tools": "tools", "documents": "documents", "reasoning_effort": "reasoning_effort",
    "add_generation_prompt": "add_generation_prompt", "continue_final_message": "continue_final_message",
}  # fmt: skip


Documents = Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)]
Kwargs = Annotated[dict[str, Any], Field(max_length=MAX_KWARGS)]


def read_variables(
    kwargs: Mapping[str, Any] | None, documents: Sequence[Mapping[str, str]] | None, effort: Effort | None
) -> dict[str, Any]:
    """The variables that the request sets, known to the template or not. Raises `BadRequest`."""
    variables = dict(kwargs or {})
    for name in variables:
        param = f"chat_template_kwargs.{name:.64}"
        if name in _OWN_FIELDS:
            raise BadRequest(f"{param} cannot be set: send the field {_OWN_FIELDS[name]} instead.", param)
        if not name.isidentifier() or name.startswith("_") or name.endswith("_token"):
            raise BadRequest(f"{param} is not a variable that a request may set.", param)
    if variables and _size(variables) > MAX_KWARGS_BYTES:
        raise BadRequest(
            f"chat_template_kwargs has more than {show_size(MAX_KWARGS_BYTES)}, the limit: send less.",
            "chat_template_kwargs",
        )
    if documents:
        variables["documents"] = [dict(document) for document in documents]
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables


def known_variables(
    variables: Mapping[str, Any],
    template: ChatTemplate,
    ignored: Ignored | None = None,
    effort_field: str = "reasoning_effort",
) -> dict[str, Any]:
    """The variables that the template reads.

    Others are noted as `ignored`, except documents, which the answer would lack. Raises `BadRequest` about documents,
    and without `ignored` about any unknown variable.
    """
    known = {name: value for name, value in variables.items() if name in template.variables}
    for name in variables:
        if name not in known and name != "reasoning_effort":
            place = "" if name in _OWN_FIELDS else "chat_template_kwargs."
            _note(ignored if place else None, place, name, f"this model's chat template has no variable {name!r}")
    effort = variables.get("reasoning_effort")
    if effort is not None and "reasoning_effort" not in known:
        if "enable_thinking" in template.variables:
            known.setdefault("enable_thinking", effort != "none")
        elif effort != "none":
            _note(ignored, "", effort_field, "this model's chat template has no such variable")
    return known


def _note(ignored: Ignored | None, place: str, name: str, reason: str) -> None:
    if ignored is None:
        raise BadRequest(f"{place}{name} has no effect: {reason}. Leave it out.", f"{place}{name}")
    ignored.add(place, name, counted=place.rstrip(".") or name)


def _size(variables: Mapping[str, Any]) -> int:
    try:
        return len(orjson.dumps(variables))
    except TypeError:  # it is nested too deeply for the library
        return MAX_KWARGS_BYTES + 1
