"""What a request tells the chat template beside its messages: documents, variables of its own, how much to reason."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from backend.text.chat_template import ChatTemplate
from gateway.errors import BadRequest
from quotas.policy.units import show_size

MAX_DOCUMENTS = 128
MAX_KWARGS = 16
MAX_KWARGS_BYTES = 2**16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_OWN_FIELDS = {  # of a request, by the template's name
    "messages": "messages", "tools": "tools", "documents": "documents", "reasoning_effort": "reasoning_effort",
    "add_generation_prompt": "add_generation_prompt", "continue_final_message": "continue_final_message",
}  # fmt: skip


Documents = Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)]
Kwargs = Annotated[dict[str, Any], Field(max_length=MAX_KWARGS)]


def read_variables(
    kwargs: Mapping[str, Any] | None, documents: Sequence[Mapping[str, str]] | None, effort: Effort | None
) -> dict[str, Any]:
    """Returns the variables that a template is given, whether it has them or not. Raises `BadRequest`."""
    variables = dict(kwargs or {})
    for name in variables:
        param = f"chat_template_kwargs.{name:.64}"
        if name in _OWN_FIELDS:
            raise BadRequest(f"{param} cannot be set: send the field {_OWN_FIELDS[name]} instead.", param)
        if not name.isidentifier() or name.startswith("_") or name.endswith("_token"):
            raise BadRequest(f"{param} is not a variable that a request may set.", param)
    if variables and _size(variables) > MAX_KWARGS_BYTES:
        raise BadRequest(
            f"chat_template_kwargs has more than {show_size(MAX_KWARGS_BYTES)}, the most that are read: send less.",
            "chat_template_kwargs",
        )
    if documents:
        variables["documents"] = [dict(document) for document in documents]
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables


def known_variables(variables: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """Returns the variables that a template has. Raises `BadRequest` about one that it does not read."""
    known = dict(variables)
    effort = known.pop("reasoning_effort", None)
    for name in known:
        if name not in template.variables:
            param = name if name in _OWN_FIELDS else f"chat_template_kwargs.{name}"
            raise BadRequest(
                f"{param} has no effect: this model's chat template has no variable {name!r}. Leave it out.", param
            )
    if effort is not None:
        known |= _reasoning(effort, template, known)
    return known


def _reasoning(effort: str, template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables by which a template has the model reason so much."""
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template.variables:
        return {"enable_thinking": given.get("enable_thinking", effort != "none")}
    if effort == "none":
        return {}
    raise BadRequest(
        "reasoning_effort has no effect: this model's chat template has no such variable. Leave it out or send none.",
        "reasoning_effort",
    )


def _size(variables: Mapping[str, Any]) -> int:
    try:
        return len(orjson.dumps(variables))
    except TypeError:  # its nesting is beyond what the library writes
        return MAX_KWARGS_BYTES + 1
