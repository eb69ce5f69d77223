"""Declares a setting: its type, its default and what the help says of it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr

ENV_PREFIX = "SLUICE_"
GROUPS = ("model", "engine", "memory", "quotas", "network", "security", "admin", "logging", "telemetry")


def _auto(value: object) -> object:
    return None if value == "auto" else value


def setting(group: str, unit: str, default: Any, description: str, **limits: Any) -> Any:
    """Returns a field; a callable default is called at start. The help shows `unit` for the value; empty: no flag."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**made, description=description, json_schema_extra={"group": group, "unit": unit}, **limits)


IntOrAuto = Annotated[int | None, BeforeValidator(_auto)]  # None: auto
ChunkOrAuto = Annotated[Annotated[int, Field(ge=1)] | Literal["off"] | None, BeforeValidator(_auto)]
BytesOrAuto = Annotated[ByteSize | None, BeforeValidator(_auto)]
FractionOrAuto = Annotated[float | None, BeforeValidator(_auto)]
NameOrAuto = Annotated[str | None, BeforeValidator(_auto)]
PathOrAuto = Annotated[Path | None, BeforeValidator(_auto)]
UrlOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]
PortOrOff = Annotated[int, Field(ge=0, le=65_535)] | Literal["off"]
SecretOrAuto = Annotated[SecretStr | None, BeforeValidator(_auto)]
