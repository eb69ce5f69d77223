"""Paths and methods."""

from typing import Any

import pytest

from gateway.admin.router import AdminRequest, Route, Router
from gateway.errors import MethodNotAllowed, RouteNotFound


async def show(visit: AdminRequest) -> dict[str, Any]:
    return {}


async def change(visit: AdminRequest) -> dict[str, Any]:
    return {}


ROUTER = Router(
    [
        Route("GET", "/things", show),
        Route("POST", "/things/{name}/cut", change),
        Route("GET", "/things/{name}", show),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "handler", "name"),
    [
        ("GET", "/things", show, ""),
        ("HEAD", "/things", show, ""),
        ("GET", "/things/a", show, "a"),
        ("GET", "/things/a/b", show, "a/b"),
        ("POST", "/things/a/b/cut", change, "a/b"),
        ("GET", "/things/line\nbreak", show, "line\nbreak"),
    ],
)
def test_a_path_has_its_handler_and_names_its_subject(method: str, path: str, handler: object, name: str) -> None:
    assert ROUTER.find(method, path) == (handler, name)


@pytest.mark.parametrize("path", ["/", "/thing", "/things/", "/things/../etc/passwd\x00"[:8], "/THINGS", "/thingsX"])
def test_any_other_path_is_not_found(path: str) -> None:
    with pytest.raises(RouteNotFound):
        ROUTER.find("GET", path)


def test_another_method_is_told_which_ones_there_are() -> None:
    with pytest.raises(MethodNotAllowed) as refused:
        ROUTER.find("DELETE", "/things/a/cut")
    assert refused.value.allowed == "POST, GET"
