"""Which handler answers a path."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import MethodNotAllowed, RouteNotFound


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """One request to the admin API, from somebody with its key."""

    actor: str  # for the audit log
    name: str = ""  # what the path names
    query: Mapping[str, str] = field(default_factory=dict)  # of each parameter the last value
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """An answer that is not JSON."""

    content: str
    content_type: str


Handler = Callable[[AdminRequest], Awaitable[dict[str, Any] | TextAnswer]]

MAX_BODY_BYTES = 4096  # of what needs no more, and of what needs none


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may have one `{name}`, which stands for anything that is not empty."""

    method: str
    path: str
    handler: Handler
    max_body_bytes: int = MAX_BODY_BYTES

    def answers(self, method: str) -> bool:
        return method == self.method or (method == "HEAD" and self.method == "GET")

    def match(self, path: str) -> str | None:
        """The name in the path, empty where the route has none; None: it is another path."""
        pattern = re.escape(self.path).replace(r"\{name\}", "(?P<name>.+)")
        found = re.fullmatch(pattern, path, re.DOTALL)
        return None if found is None else found.groupdict().get("name", "")


class Router:
    """The first route that matches wins."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)

    def max_body_bytes(self, method: str, path: str) -> int:
        """That will be read of a request, also of one that no route answers."""
        answering = (route for route in self._routes if route.answers(method) and route.match(path) is not None)
        return next((route.max_body_bytes for route in answering), MAX_BODY_BYTES)

    def find(self, method: str, path: str) -> tuple[Handler, str]:
        """The handler, and the name in the path. Raises `RouteNotFound` and `MethodNotAllowed`."""
        allowed = []
        for route in self._routes:
            name = route.match(path)
            if name is None:
                continue
            if route.answers(method):
                return route.handler, name
            allowed.append(route.method)
        if allowed:
            methods = ", ".join(allowed)
            raise MethodNotAllowed(f"{path:.200} does not answer {method}; use {methods}.", methods)
        raise RouteNotFound(f"Unknown request URL: {method} {path:.200}.")
