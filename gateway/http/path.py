"""The path of a request as routes name it."""

import re

from starlette.types import Scope

_SLASHES = re.compile("//+")


def route_path(scope: Scope) -> str:
    """Returns the path without doubled and trailing slashes, such as those that a base URL brings along, and has the
    scope say the same.
    """
    path: str = scope["path"]
    if path.endswith("/") or "//" in path:
        path = scope["path"] = _SLASHES.sub("/", path).rstrip("/") or "/"
    return path
