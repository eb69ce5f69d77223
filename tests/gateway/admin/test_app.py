from functools import partial
from typing import Any

import httpx
import pytest

from gateway.admin.admins import AdminKeys
from gateway.admin.app import AdminApp
from gateway.admin.endpoint import MAX_BODY_BYTES, AdminRequest, Blob, Json, admin_route

KEY = "correct-horse-battery"
PATH = "/admin/things"
ROOMY = "/admin/roomy"


calls: list[tuple[str, str]] = []  # the handler and what the path names, in order


async def answer(handler: str, request: AdminRequest) -> Json:
    calls.append((handler, request.name))
    return {}


show, change = partial(answer, "show"), partial(answer, "change")


async def metrics() -> bytes:
    return b"up 1\n"


APP = AdminApp(
    AdminKeys(KEY),
    [
        admin_route("GET", PATH, show),
        admin_route("POST", f"{PATH}/{{name:name}}/cut", change),
        admin_route("GET", f"{PATH}/{{name:name}}", show),
        admin_route("POST", ROOMY, change, 2 * MAX_BODY_BYTES),
    ],
    {"/": Blob(b"<p>", "text/html")},
    {},
    metrics,
)


async def asked(method: str, path: str, key: str = KEY, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(APP, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.request(method, path, headers={"authorization": f"Bearer {key}"}, **body)


@pytest.mark.parametrize(
    ("method", "path", "handler", "name"),
    [
        ("GET", "", "show", ""),
        ("HEAD", "", "show", ""),
        ("GET", "/a", "show", "a"),
        ("GET", "/a/b", "show", "a/b"),
        ("POST", "/a/b/cut", "change", "a/b"),
        ("GET", "/line%0Abreak", "show", "line\nbreak"),
    ],
)
async def test_a_path_has_its_handler_and_names_its_subject(method: str, path: str, handler: str, name: str) -> None:
    reply = await asked(method, PATH + path)
    assert reply.status_code == 200
    assert calls[-1] == (handler, name)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", f"{PATH}/a/cut", "POST, GET"),
        ("POST", PATH, "GET"),
        ("POST", "/metrics", "GET"),
        ("POST", "/", "GET"),
    ],
)
async def test_another_method_is_told_which_ones_there_are(method: str, path: str, allowed: str) -> None:
    reply = await asked(method, path)
    assert reply.status_code == 405
    assert reply.headers["allow"] == allowed
    assert reply.json()["error"]["message"] == f"{path} does not answer {method}; use {allowed}."


async def test_metrics_are_text() -> None:
    reply = await asked("GET", "/metrics")
    assert (reply.text, reply.headers["content-type"]) == ("up 1\n", "text/plain; version=0.0.4; charset=utf-8")


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        (ROOMY, 2 * MAX_BODY_BYTES, 200),
        (ROOMY, 2 * MAX_BODY_BYTES + 1, 413),
        (f"{PATH}/a/cut", MAX_BODY_BYTES, 200),
        (f"{PATH}/a/cut", MAX_BODY_BYTES + 1, 413),
        (PATH, MAX_BODY_BYTES + 1, 413),
        ("/admin/nothing", MAX_BODY_BYTES + 1, 413),
    ],
)
async def test_each_route_has_a_limit_for_bodies_also_what_no_route_answers(path: str, size: int, status: int) -> None:
    assert (await asked("POST", path, content=b" " * size)).status_code == status


@pytest.mark.parametrize(("fields", "status"), [(16, 200), (17, 400)])
async def test_a_query_has_a_bounded_number_of_fields(fields: int, status: int) -> None:
    query = "&".join(f"f{n}={n}" for n in range(fields))
    assert (await asked("GET", f"{PATH}?{query}")).status_code == status


async def test_an_unforeseen_error_reveals_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> bytes:
        raise ValueError("inside")

    app = AdminApp(AdminKeys(KEY), [], {}, {}, broken)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        reply = await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
    assert reply.status_code == 500
    assert "inside" not in reply.text
    assert "inside" in caplog.text
