"""Declares a setting: its type, its default and what the help says of it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

ENV_PREFIX = "SLUICE_"
GROUPS = ("model", "engine", "memory", "quotas", "network", "security", "admin", "logging", "telemetry")


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _listed(value: object) -> object:
    return tuple(one for one in value.split(",") if one) if isinstance(value, str) else value


def setting(group: str, unit: str, default: Any, description: str, *, form: str = "", **limits: Any) -> Any:
    """Returns a field; a callable default is called at start. The help shows `unit` for the value; empty: no flag.
    `form` says in words what the `pattern` among the limits matches.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    made |= {"json_schema_extra": {"group": group, "unit": unit, "form": form}}
    return Field(**made, description=description, **limits)


class SettingRecord(BaseSettings):
    """Settings of one subject; they are frozen and read once at start."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )


IntOrAuto = Annotated[int | None, BeforeValidator(_auto)]  # None: auto
ChunkOrAuto = Annotated[Annotated[int, Field(ge=1)] | Literal["off"] | None, BeforeValidator(_auto)]
NameList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]
"""A flag that may be repeated, and a variable with commas."""

BytesOrAuto = Annotated[ByteSize | None, BeforeValidator(_auto)]
FractionOrAuto = Annotated[float | None, BeforeValidator(_auto)]
NameOrAuto = Annotated[str | None, BeforeValidator(_auto)]
PathOrAuto = Annotated[Path | None, BeforeValidator(_auto)]
UrlOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]
PortOrOff = Annotated[int, Field(ge=0, le=65_535)] | Literal["off"]
SecretOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]
