"""The admin port's application: who is let in, and an answer whatever happens."""

import logging
import time
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admin.page_files import PageFile
from gateway.admin.port import AdminKey
from gateway.admin.router import AdminRequest, Router, TextAnswer
from gateway.errors import ApiError, BadRequest, InternalError, MethodNotAllowed, RouteNotFound
from gateway.http.connection import show_key
from gateway.http.request_scope import ClientGone, read_body
from gateway.http.responses import ResponseWriter, encode_headers
from gateway.telemetry.metrics.prometheus import CONTENT_TYPE

log = logging.getLogger(__name__)

MAX_QUERY = 16  # fields
BODY_TIMEOUT = 5.0  # seconds
ADMIN = "admin"  # whose all connections are that have shown the key
HARDENING = encode_headers(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
)
_METRICS = encode_headers({"content-type": CONTENT_TYPE})


class AdminApp:
    """Probes and the page's files are open to everyone who reaches the port; all else needs the admin key."""

    def __init__(
        self,
        key: AdminKey,
        router: Router,
        page: Mapping[str, PageFile],
        probes: Mapping[str, ASGIApp],
        metrics: Callable[[], bytes],
    ) -> None:
        self._key = key
        self._router = router
        self._page = page
        self._probes = probes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _hardened(send)
        exchange = ResponseWriter(scope, send, time.monotonic)
        try:
            await self._answer(scope, receive, exchange)
        except ClientGone:
            return
        except ApiError as error:
            await exchange.fail(error)
        except Exception as error:
            log.error("a request to the admin port failed", exc_info=error)
            await exchange.fail(InternalError("The gateway failed to answer this request. It has been logged."))

    async def _answer(self, scope: Scope, receive: Receive, exchange: ResponseWriter) -> None:
        method, path = scope["method"], scope["path"]
        if path == "/metrics" or path.startswith("/admin/"):
            self._key.check(exchange.header(b"authorization"))
            show_key(scope, ADMIN)
            body = await read_body(scope, receive, self._router.max_body_bytes(method, path), BODY_TIMEOUT)
            await self._answer_admin(scope, exchange, body)
        elif path in self._probes:
            _require_get(method, path)
            await self._probes[path](scope, receive, exchange.send)
        elif path in self._page:
            _require_get(method, path)
            file = self._page[path]
            await exchange.reply(file.content, headers=encode_headers({"content-type": file.content_type}))
        else:
            raise RouteNotFound(f"Unknown request URL: {method} {path:.200}.")

    async def _answer_admin(self, scope: Scope, exchange: ResponseWriter, body: bytes) -> None:
        method, path = scope["method"], scope["path"]
        if path == "/metrics":
            _require_get(method, path)
            await exchange.reply(self._metrics(), headers=_METRICS)
            return
        handler, name = self._router.find(method, path)
        query = _query(scope["query_string"])
        answer = await handler(AdminRequest(self._actor(scope), name, query, body))
        if isinstance(answer, TextAnswer):
            await exchange.reply(answer.content.encode(), headers=encode_headers({"content-type": answer.content_type}))
        else:
            await exchange.reply(orjson.dumps(answer))

    def _actor(self, scope: Scope) -> str:
        host, port = scope.get("client") or ("unknown", 0)
        return f"key {self._key.fingerprint} from {host}:{port}"


def _query(text: bytes) -> dict[str, str]:
    """Raises `BadRequest`."""
    try:
        return dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_QUERY))
    except ValueError:
        raise BadRequest(f"The query has more than {MAX_QUERY} fields.") from None


def _require_get(method: str, path: str) -> None:
    if method not in ("GET", "HEAD"):
        raise MethodNotAllowed(f"{path:.200} does not answer {method}; use GET.", "GET")


def _hardened(send: Send) -> Send:
    """With the headers that tell a browser to do nothing but what the page needs."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *HARDENING]}
        await send(message)

    return sending
