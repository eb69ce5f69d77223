"""Fields that this API does not have and clients send all the same: what libraries keep of answers, and what other
servers take. Echoes are dropped. What would change an answer is refused by its name, and other fields are ignored and
told of, or refused, as the operator chooses.
"""

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

import orjson
from pydantic import BeforeValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from gateway.http.json_body import MAX_FIELDS, NAMELESS
from gateway.key_mask import masked

OTHERS = "other"  # label of unknown field names, which clients make up
MAX_HEADER_BYTES = 1024  # of the header `x-sluice-ignored`

Values = tuple[Any, ...]


class Ignored(dict[str, str]):
    """The ignored fields of one request: their places, and the names that the metric counts."""

    def add(self, place: str, name: str, counted: str = OTHERS) -> None:
        self[f"{place}{name[:64] or NAMELESS}"] = counted


def ignored_header(places: Collection[str]) -> dict[str, str]:
    """The header `x-sluice-ignored`: percent-encoded places in a body, up to its limit, and the number of the others.
    Empty without ignored fields.
    """
    told, size = list[str](), 0
    for place in places:
        shown = quote(masked(place[:MAX_HEADER_BYTES]), safe="/~$.[]")
        size += len(shown) + 2
        if size > MAX_HEADER_BYTES:
            told.append(f"and {len(places) - len(told)} more")
            break
        told.append(shown)
    return {"x-sluice-ignored": ", ".join(told)} if told else {}


# echoes: members of an answer, or annotations, that client libraries send back
ECHOES = frozenset(
    (
        "additional_kwargs", "annotations", "cache_control", "citations", "created", "created_at",
        "experimental_providerMetadata", "extra_content", "finish_reason", "id", "index", "is_error", "logprobs",
        "metadata", "model", "opts", "provider", "providerMetadata", "providerOptions", "provider_details",
        "provider_name", "provider_specific_fields", "reasoning_details", "response_metadata", "signature", "status",
        "stop_reason", "stop_sequence", "thinking_blocks", "thought_signature", "timestamp", "token_ids", "usage",
        "usage_metadata",
    )
)  # fmt: skip
# without effect on an answer's text, or for other servers alone; with the values that mean the same everywhere
IGNORABLE: Mapping[str, Values] = {
    **dict.fromkeys(
        (
            "anthropic_beta", "anthropic_version", "background_tasks", "betas", "cache_prompt", "chat_id",
            "dry_allowed_length", "dry_base", "dry_multiplier", "enable_thinking", "features", "id", "id_slot",
            "include", "keep_alive", "kv_transfer_params", "media_io_kwargs", "min_keep", "mirostat", "mirostat_eta",
            "mirostat_tau", "mm_processor_kwargs", "model_item", "models", "n_probs", "options", "prediction",
            "prompt_cache_options", "provider", "providerOptions", "reasoning", "repeat_last_n", "repeat_penalty",
            "request_id", "rid", "route", "samplers", "separate_reasoning", "session_id", "stream_reasoning", "tfs_z",
            "thinking", "timings_per_token", "tool_ids", "top_a", "trace", "transforms", "typical_p", "usage",
            "user_id", "variables", "vllm_xargs", "xtc_probability", "xtc_threshold",
        ),
        (),
    ),
    "length_penalty": (1, 1.0), "priority": (0,), "prompt_cache_retention": ("in_memory",), "store": (False,),
    "verbosity": ("medium",),
    # variables of the chat template, which may not read them
    "chat_template_kwargs": (), "reasoning_effort": (),
}  # fmt: skip
# would change the answer; with the values that would not, or this API's replacement
REFUSED: Mapping[str, Values | str] = {
    "custom_logit_processor": (), "echo": (False,), "format": "response_format", "functions": "tools",
    "function_call": ("none", "auto"), "json_schema": "response_format", "logits_processors": ([],), "lora_path": (),
    "lora_request": (), "moderation": (), "prompt_embeds": (), "spaces_between_special_tokens": (True,),
    "stop_sequences": "stop", "use_beam_search": (False,),
    "ebnf": "structured_outputs.grammar", "grammar": "structured_outputs.grammar", "regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice", "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json", "guided_regex": "structured_outputs.regex",
    "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens", "max_tokens_to_sample": "max_tokens",
    "n_predict": "max_tokens", "num_predict": "max_tokens",
}  # fmt: skip
_FILES: Mapping[str, Values] = {
    "attachments": ([],), "audio": ([],), "experimental_attachments": ([],), "files": ([],), "images": ([],),
    "videos": ([],),
}  # fmt: skip
REFUSED_IN_CHAT: Mapping[str, Values | str] = {
    **REFUSED, **_FILES, "best_of": (1,), "chat_template": (), "image_data": ([],), "input": "messages",
    "instructions": "a message of the role system", "modalities": (["text"],), "plugins": ([],), "prompt": "messages",
    "system": "a message of the role system", "web_search_options": (),
}  # fmt: skip
REFUSED_IN_COMPLETION: Mapping[str, Values | str] = {
    **{name: values for name, values in REFUSED.items() if name != "echo"},
    "max_completion_tokens": "max_tokens", "messages": "prompt, or the messages to /v1/chat/completions",
    "tools": "them to /v1/chat/completions", "top_logprobs": "logprobs",
}  # fmt: skip
REFUSED_IN_MESSAGE: Mapping[str, Values | str] = {
    **_FILES, "function_call": "tool_calls", "partial": (False,), "prefix": (False,),
}  # fmt: skip


def refused_by_names(fields: Collection[str], names: Mapping[str, str]) -> dict[str, Values | str]:
    """The refused chat fields of a dialect: those outside its own `fields`, with the replacement by its own `names`."""
    of_chat = {name: values for name, values in REFUSED_IN_CHAT.items() if name not in fields}
    return {
        name: names.get(values.partition(".")[0], values) if isinstance(values, str) else values
        for name, values in of_chat.items()
    }


REFUSED_IN_PART = frozenset(
    (
        "audio", "audio_url", "file", "file_data", "file_id", "image", "image_url", "input_audio", "source", "video",
        "video_url",
    )
)  # fmt: skip


def known_object(
    form: Any,
    place: str = "",
    *,
    refused: Mapping[str, Values | str] | None = None,
    ignorable: Mapping[str, Values] | None = None,
    echoes: frozenset[str] = frozenset(),
) -> BeforeValidator:
    """The validator that removes foreign fields of an object before its type is checked.

    The context of a validation is the `Ignored` of its request; None: unknown fields are refused.
    """
    names: frozenset[str] = form.__required_keys__ | form.__optional_keys__
    refusals, harmless = refused or {}, ignorable or {}

    def stays(name: str, value: Any, ignored: Ignored | None) -> bool:
        if name in refusals:
            _check_refused(name, value, refusals[name])
        elif name in echoes or says_nothing(value) or _is_among(value, harmless.get(name, ())):
            pass
        elif ignored is not None:
            ignored.add(place, name, name if name in harmless else OTHERS)
        elif name in harmless:
            raise _unsupported(name, harmless[name])
        else:
            return True  # and is refused as unknown
        return False

    def check(value: Any, info: ValidationInfo) -> Any:
        if type(value) is not dict or (len(value) <= MAX_FIELDS and names.issuperset(value)):
            return value
        if len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "must hold at most {limit} fields", {"limit": MAX_FIELDS})
        return {name: item for name, item in value.items() if name in names or stays(name, item, info.context)}

    return BeforeValidator(check)


def says_nothing(value: Any) -> bool:
    return value is None or (type(value) in (list, dict) and not value)


def _is_among(value: Any, values: Values) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


def _check_refused(name: str, value: Any, neutral: Values | str) -> None:
    """Raise for a field that would change the answer, unless its value is neutral."""
    if isinstance(neutral, str):
        if value is not None and value != []:
            raise PydanticCustomError(
                "unsupported", "is not a field of this API: send {instead} instead", {"instead": neutral, "field": name}
            )
    elif value is not None and not _is_among(value, neutral):
        raise _unsupported(name, neutral)


def _unsupported(name: str, neutral: Values) -> PydanticCustomError:
    allowed = " or ".join(["null", *(orjson.dumps(one).decode() for one in neutral)])
    return PydanticCustomError(
        "unsupported", "is not supported here; leave it out or send {allowed}", {"allowed": allowed, "field": name}
    )
