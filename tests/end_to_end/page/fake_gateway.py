"""A gateway's admin port that gives the answers a test chooses."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.routing import Route

from gateway.admin.admins import AdminKeys
from gateway.admin.api import PREFIX
from gateway.admin.app import AdminApp
from gateway.admin.endpoint import AdminRequest, Blob, admin_route
from gateway.admin.page_files import page_files
from gateway.admin.policy import PASTED_BODY_BYTES, PastedPolicy, PolicyCheck
from gateway.errors import RouteNotFound
from gateway.http.json_body import JsonBody, parse_body
from quotas.policy.policy_file import parse_policy
from tests.end_to_end.page import page_data
from tests.gateway.server_process import eventually

KEY = "admin-key-of-a-test"
NO_PROVIDER = {"/oidc/session": Blob(b'{"offered": false}', "application/json")}

Json = dict[str, Any]


class FakeGateway:
    """Serves the page, and `answers` by path to each GET; a path that has none is answered 404."""

    def __init__(self) -> None:
        rows = page_data.requests()
        self.answers: dict[str, Json] = {
            "me": {"name": "ada", "role": "admin"},
            "overview": page_data.overview(),
            "tenants": page_data.tenants(),
            "requests": rows,
            "queue": page_data.queue(rows["live"]),
            "kv": page_data.kv(),
            "refusals": page_data.refusals(),
            "diagnosis": page_data.diagnosis(),
            "policy": page_data.policy(),
            "keys": page_data.keys(),
            "audit": page_data.audit(),
            "usage": page_data.usage(),
            "budgets": page_data.budgets(),
            "request-log": {"requests": rows["recent"], "next": "5.5_1"},
        }
        self.policy = parse_policy({"policy.yaml": page_data.POLICY.encode()})
        self._policy_check = PolicyCheck()
        self.tenant: Json = page_data.tenant_detail("acme")  # but for its name
        self.cancelled: list[str] = []  # ids, in order
        self.num_overviews = 0
        self.queries: dict[str, dict[str, str]] = {}  # the latest of each path
        self.found: dict[tuple[str, str], Json] = {}  # answers by path to questions for words, other than to the rest
        self.held: dict[str, threading.Event] = {}  # by path: the next answer waits for it
        self.port = 0
        self._routes = self._make_routes()
        self.use_key(KEY)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def show_requests(self, *live: Json, recent: tuple[Json, ...] = ()) -> None:
        """Replaces the live and the ended requests."""
        self.answers["requests"] = {"live": list(live), "recent": list(recent), "truncated": 0}

    def use_key(self, key: str) -> None:
        """Accepts this key alone, from the next start."""
        self._app = AdminApp(AdminKeys(key), self._routes, page_files(), NO_PROVIDER, lambda: b"")

    def start(self) -> None:
        """Starts serving, on the port it had before if it had one."""
        sock = socket.create_server(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self._app, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]})
        self._thread.start()
        eventually(lambda: self._server.started)

    def stop(self) -> None:
        """Stop serving; new connections are refused from then on."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _make_routes(self) -> list[Route]:
        return [
            *(admin_route("GET", f"{PREFIX}/{part}", self._answer(part)) for part in self.answers),
            admin_route("GET", f"{PREFIX}/usage.csv", self._usage_csv),
            admin_route("GET", f"{PREFIX}/policy/text", self._policy_text),
            admin_route("POST", f"{PREFIX}/policy/check", self._check_policy, PASTED_BODY_BYTES),
            admin_route("GET", f"{PREFIX}/tenants/{{name:name}}", self._tenant),
            admin_route("POST", f"{PREFIX}/requests/{{name:name}}/cancel", self._cancel),
            admin_route("GET", f"{PREFIX}/requests/{{name:name}}", self._request),
        ]

    def _answer(self, part: str) -> Callable[[AdminRequest], Any]:
        async def answer(request: AdminRequest) -> Json:
            self.num_overviews += part == "overview"
            self.queries[part] = dict(request.query)
            if part not in self.answers:
                raise RouteNotFound(f"{part} is broken.")
            answer = self.found.get((part, request.words)) or self.answers[part]
            if (event := self.held.pop(part, None)) is not None:
                await asyncio.to_thread(event.wait)
            return answer

        return answer

    async def _tenant(self, request: AdminRequest) -> Json:
        return self.tenant | {"name": request.name}

    async def _usage_csv(self, request: AdminRequest) -> Blob:
        return Blob(b"day,tenant\n2026-09-01,acme\n", "text/csv; charset=utf-8")

    async def _policy_text(self, request: AdminRequest) -> Json:
        return await self._policy_check.text(self.policy)

    async def _check_policy(self, request: AdminRequest) -> Json:
        return await self._policy_check.of(parse_body(PastedPolicy, JsonBody.of(request.body)), self.policy)

    async def _request(self, request: AdminRequest) -> Json:
        return page_data.request_detail(self._find(request.name, "live", "recent"))

    async def _cancel(self, request: AdminRequest) -> Json:
        row = self._find(request.name, "live")
        self.cancelled.append(row["id"])
        self.answers["requests"]["live"].remove(row)
        return {"cancelled": True}

    def _find(self, name: str, *lists: str) -> Json:
        for rows in lists:
            for row in self.answers["requests"][rows]:
                if name in (row["id"], row["response_id"]):
                    found: Json = row
                    return found
        raise RouteNotFound(f"No request {name!r:.100}.")
