"""Lets web pages of other origins call the API, as the Fetch standard has browsers ask (CORS protocol).

A caller shows its key in a header, never in a cookie, so a page can do no more than the key's holder.
"""

import re
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

OFF, ANY = "off", "*"
ORIGINS = r"off|\*|https?://[^\s/,*]+(?:,https?://[^\s/,*]+)*"  # of the setting
PREFLIGHT_SECONDS = 7200  # for which a browser caches a preflight, Chromium's maximum
_HEADERS = re.compile(rb"[\w\-, ]{0,2048}", re.ASCII)

Headers = list[tuple[bytes, bytes]]


class Cors:
    """Says which origins may call, and answers browsers that ask before they send a request."""

    def __init__(self, origins: str) -> None:
        """`origins` are separated by commas; `*` stands for all."""
        self._origins = frozenset(origins.encode().split(b","))
        self._is_open = origins == ANY

    @staticmethod
    def of(setting: str) -> "Cors | None":
        return None if setting == OFF else Cors(setting)

    def headers(self, origin: bytes | None) -> Mapping[str, str]:
        """The CORS headers of a response to a page of this origin: its script may read the body and all headers.

        An origin that may not call gets `vary` alone, so that caches keep the answers apart.
        """
        if self._is_open:
            return _OPEN
        allowed = {"vary": "Origin"}
        if origin in self._origins:
            allowed |= {"access-control-allow-origin": origin.decode("latin-1"), "access-control-expose-headers": "*"}
        return allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer OPTIONS. It takes no key, reads no body and leaves no record."""
        asked = dict(reversed(scope["headers"]))
        allowed: Headers = [
            (name.encode(), value.encode("latin-1")) for name, value in self.headers(asked.get(b"origin")).items()
        ]
        if len(allowed) > 1:
            headers = asked.get(b"access-control-request-headers", b"")
            allowed += [
                (b"access-control-allow-methods", b"GET, POST, DELETE"),
                (b"access-control-allow-headers", headers if _HEADERS.fullmatch(headers) else b""),
                (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
            ]
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})


_OPEN = {"access-control-allow-origin": "*", "access-control-expose-headers": "*"}
