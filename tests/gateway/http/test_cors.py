import re
from typing import Any

import pytest

from gateway.http.cors import ORIGINS, Cors


@pytest.mark.parametrize("setting", ["off", "*", "https://a.example", "http://localhost:3000,https://b.example"])
def test_a_setting_is_a_list_of_origins(setting: str) -> None:
    assert re.fullmatch(ORIGINS, setting)
    assert (Cors.of(setting) is None) == (setting == "off")


@pytest.mark.parametrize(
    "setting", ["", "a.example", "https://a.example/", "https://a,", "https://*.example", "*,*", "ftp://a"]
)
def test_a_malformed_origin_is_refused(setting: str) -> None:
    assert not re.fullmatch(ORIGINS, setting)


def test_only_pages_of_listed_origins_may_read() -> None:
    cors = Cors("https://a.example,http://localhost:3000")
    for origin in (b"https://a.example", b"http://localhost:3000"):
        assert cors.headers(origin)["access-control-allow-origin"] == origin.decode()
    for other in (
        None,
        b"",
        b"https://b.example",
        b"https://a.example:443",
        b"null",
        b"https://a.example,http://localhost:3000",
    ):
        assert cors.headers(other) == {"vary": "Origin"}
    assert Cors("*").headers(None)["access-control-allow-origin"] == "*"


async def _asked(cors: Cors, **headers: bytes) -> dict[bytes, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("a body is read")

    given = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    await cors({"type": "http", "headers": given}, receive, send)
    assert sent[0]["status"] == 204
    return dict(sent[0]["headers"])


async def test_a_browser_is_allowed_the_headers_that_it_names() -> None:
    cors = Cors("https://a.example")
    asked = await _asked(cors, origin=b"https://a.example", access_control_request_headers=b"authorization, x-a")
    assert asked[b"access-control-allow-headers"] == b"authorization, x-a"
    assert asked[b"access-control-allow-methods"] == b"GET, POST, DELETE"
    evil = await _asked(cors, origin=b"https://a.example", access_control_request_headers=b"a\r\nset-cookie: b")
    assert evil[b"access-control-allow-headers"] == b""
    assert await _asked(cors, origin=b"https://b.example") == {b"vary": b"Origin"}
