"""Endpoints of the admin API: routes, requests to handlers, and their answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.admin.admins import Admin, Role
from gateway.errors import BadRequest
from gateway.http.request_scope import read_body
from gateway.http.responses import ResponseWriter, encode_headers

MAX_BODY_BYTES = 4096  # default for all handlers
BODY_TIMEOUT_SECONDS = 5.0
MAX_QUERY_FIELDS = 16  # fields
MAX_SEARCH_CHARS = 200

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """One authenticated request to the admin API."""

    actor: str  # for the audit log
    admin: Admin | None = None  # who asks; None: the gateway itself
    name: str = ""  # of the path's variable part
    query: Mapping[str, str] = field(default_factory=dict)  # the last value of each parameter
    body: bytes = b""

    @property
    def words(self) -> str:
        """The text to look for in the names of a list, ignoring case."""
        return self.query.get("contains", "")[:MAX_SEARCH_CHARS]


@dataclass(frozen=True, slots=True)
class Blob:
    """An answer that is not JSON, of a content type: a file of the page, a table or metrics."""

    content: bytes
    content_type: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the bytes, as an ASGI application does."""
        headers = encode_headers({"content-type": self.content_type})
        await ResponseWriter(scope, send, time.monotonic).reply(self.content, headers=headers)


Handler = Callable[[AdminRequest], Awaitable[Json | Blob]]


class AdminEndpoint:
    """An ASGI application that reads a request, calls its handler and sends the result."""

    def __init__(self, handler: Handler, role: Role, max_body_bytes: int) -> None:
        self._handler = handler
        self._role = role
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of `scope["user"]`, the admin that the key check found. Raises `ApiError` and
        `ClientGone`.
        """
        admin: Admin = scope["user"]
        admin.require(self._role)
        body = await read_body(scope, receive, self._max_body_bytes, BODY_TIMEOUT_SECONDS)
        name = scope["path_params"].get("name", "")
        asked = AdminRequest(actor_of(admin, scope), admin, name, _query(scope["query_string"]), body)
        answer = await self._handler(asked)
        if not isinstance(answer, Blob):
            answer = Blob(await asyncio.to_thread(orjson.dumps, answer), "application/json")
        await answer(scope, receive, send)


def actor_of(admin: Admin, scope: Scope) -> str:
    """The asker and its address, for the audit log."""
    host, port = scope.get("client") or ("unknown", 0)
    return f"{admin.name} from {host}:{port}"


def admin_route(
    method: str, path: str, handler: Handler, max_body_bytes: int = MAX_BODY_BYTES, role: Role = Role.VIEWER
) -> Route:
    """Make a route for admins of this role, whose path may hold one `{name:name}`; a body of more than
    `max_body_bytes` is refused.
    """
    return Route(path, AdminEndpoint(handler, role, max_body_bytes), methods=[method])


async def who_asks(request: AdminRequest) -> Json:
    """The admin's name and role, for a page that shows what it may do."""
    assert request.admin is not None
    return {"name": request.admin.name, "role": request.admin.role}


class NameConvertor(Convertor[str]):
    """Matches the name of a tenant, request, key or adapter in a path: any text, with slashes and line breaks, but an
    empty one.
    """

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", NameConvertor())


def _query(text: bytes) -> dict[str, str]:
    """Return the last value of each parameter. Raises `BadRequest` for too many."""
    try:
        return dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise BadRequest(f"The query has more than {MAX_QUERY_FIELDS} fields.") from None
