"""Settings as an operator writes them: flags with their help, `SLUICE_*` variables, and errors that name both."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import EnumType
from pathlib import PurePath
from typing import Any, get_origin

from pydantic import ByteSize, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.quoting import quoted
from gateway.settings.field import ENV_PREFIX, GROUPS
from gateway.settings.settings import Settings, format_bytes

CACHE_DIR = "SLUICE_CACHE_DIR"  # where compiled kernels are kept; read by the engine itself


class SettingsError(ValueError):
    """Settings cannot be served; each line of the message names a flag, its value and what would work."""


def add_flags(parser: ArgumentParser, only: Mapping[str, str] | None = None) -> None:
    """Add a flag for each setting with a unit, in groups. `only` limits the flags to these settings, with the help of a
    command that does not serve.
    """
    meanings = only or {name: field.description or "" for name, field in Settings.model_fields.items()}
    for group in GROUPS:
        section = parser.add_argument_group(group)
        for name, field in Settings.model_fields.items():
            if name in meanings and _extra(field)["group"] == group and _extra(field)["unit"]:
                how: Any = {"action": "store_true"} if field.annotation is bool else {"metavar": _metavar(field)}
                how |= {"action": "append"} if get_origin(field.annotation) is tuple else {}
                section.add_argument(_flag(name), dest=name, default=SUPPRESS, help=_help(meanings[name], field), **how)


def load(namespace: Namespace) -> Settings:
    """Build settings from parsed flags over the environment over the defaults.

    Raises `SettingsError` with one line for every problem.
    """
    flags = {name: value for name, value in vars(namespace).items() if name in Settings.model_fields}
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def misspelled(environ: Mapping[str, str]) -> list[str]:
    """A line for every unknown `SLUICE_*` variable, with the nearest known name."""
    known = [_variable(name) for name in Settings.model_fields]
    unknown = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in {*known, CACHE_DIR})
    return [f"{name} is not a setting and is ignored{suggestion(name, known)}" for name in unknown]


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name; empty without a similar known name."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def _metavar(field: FieldInfo) -> str:
    kind: Any = field.annotation
    choices: tuple[Any, ...] = tuple(kind) if isinstance(kind, EnumType) else getattr(kind, "__args__", ())
    return (
        "|".join(choices) if choices and all(isinstance(choice, str) for choice in choices) else _extra(field)["unit"]
    )


def _help(meaning: str, field: FieldInfo) -> str:
    return f"{meaning} (default: {_default(field)})".replace("%", "%%")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "none" if "auto" not in (field.description or "") else "auto"
    if isinstance(value, ByteSize):
        return format_bytes(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _explain(error: ValidationError) -> str:
    """Return one line for each setting: pydantic reports one error for each member of a union."""
    reasons: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        reasons.setdefault(name, []).append(_reason(name, problem))
        given[name] = _shown(name, problem["input"])
    return "\n".join(_line(name, reason, given[name]) for name, reason in reasons.items())


def _line(name: str, reasons: list[str], given: str) -> str:
    if not name:  # contradictions between settings need no prefix
        return "\n".join(reasons)
    what = " or ".join([reasons[0], *(reason.removeprefix("must be ") for reason in reasons[1:])])
    return f"{_source(name)}: {what}{given}"


def _source(name: str) -> str:
    """The flag and variable of a setting; a secret has no flag, since other users may read a command line."""
    field = Settings.model_fields.get(name)
    has_flag = field is None or bool(_extra(field)["unit"])
    return f"{_flag(name)} ({_variable(name)})" if has_flag else _variable(name)


_RULES = {  # by pydantic's name of an error
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "byte_size": "a size such as 512MiB",
    "byte_size_unit": "a size such as 512MiB",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_too_short": "at least {min_length} character long",
    "string_too_long": "at most {max_length} characters long",
    "string_pattern_mismatch": "{form}",
}


def _reason(name: str, problem: ErrorDetails) -> str:
    """Our validators' own words, or pydantic's error in the words of the API's."""
    if (rule := _RULES.get(problem["type"])) is None:
        return problem["msg"].removeprefix("Value error, ")
    extra = _extra(Settings.model_fields[name])
    given = problem.get("ctx", {})
    show = format_bytes if extra["unit"] == "BYTES" else str
    bounds = {
        kind: bound if isinstance(bound, str) else show(bound).removesuffix(".0") for kind, bound in given.items()
    }
    return f"must be {rule.format(**bounds, form=extra['form'])}"


def _shown(name: str, value: object) -> str:
    secret = Settings.model_fields[name].annotation == SecretStr | None if name else True
    shown = str(value) if isinstance(value, PurePath) else value
    return "" if secret else f"; got {quoted(shown) if isinstance(shown, str) else shown}"
