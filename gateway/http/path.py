"""The path of a request, normalized for routing."""

import re

from starlette.types import Scope

_SLASHES = re.compile("//+")


def route_path(scope: Scope) -> str:
    """The path without doubled and trailing slashes, which base URLs often bring along; the scope is changed alike."""
    path: str = scope["path"]
    if path.endswith("/") or "//" in path:
        path = scope["path"] = _SLASHES.sub("/", path).rstrip("/") or "/"
    return path
