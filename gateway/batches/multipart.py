"""Reads multipart/form-data (RFC 7578) part by part, as it comes: a file is never in memory as a whole."""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from gateway.errors import BadRequest
from gateway.http.request_scope import BodyParts

MAX_PARTS = 16
MAX_HEAD_BYTES = 4096  # of the headers of a part
MAX_NAME_CHARS = 255
_BOUNDARY = re.compile(
    rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE
)
_DISPOSITION = re.compile(rb"content-disposition:\s*form-data\s*(;[^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field of a form. `chunks` has to be read to its end before the next part."""

    name: str
    filename: str | None
    chunks: AsyncIterator[bytes]

    async def text(self, most: int) -> str:
        """The value of a short field. Raises `BadRequest`."""
        value = b""
        async for chunk in self.chunks:
            value += chunk
            if len(value) > most:
                raise BadRequest(f"{self.name} must have at most {most} bytes.", self.name)
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{self.name} must be text in UTF-8.", self.name) from None


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that a content type names. Raises `BadRequest`."""
    match = _BOUNDARY.match(content_type.strip())
    if match is None:
        raise BadRequest("A file is sent as multipart/form-data; boundary=...: set that.", "content-type")
    return match[1] or match[2]


class FormReader:
    """Reads the parts of a form from its body."""

    def __init__(self, boundary: bytes, body: BodyParts) -> None:
        self._mark = b"\r\n--" + boundary
        self._body = body
        self._rest = b"\r\n"  # the first boundary has no line before it

    async def parts(self) -> AsyncGenerator[FormPart, None]:
        """Yield each part. Raises `BadRequest` for a form that is malformed or ends too early."""
        async for _ in self._until_mark():
            pass  # the preamble
        for _ in range(MAX_PARTS):
            end = await self._take(2)
            if end == b"--":
                while self._body.more:
                    await self._body.next()  # the epilogue
                return
            if end != b"\r\n":
                raise BadRequest("The form is malformed: a boundary is not followed by a line's end.", "body")
            name, filename = _named(await self._head())
            yield FormPart(name, filename, self._until_mark())
        raise BadRequest(f"The form has more than {MAX_PARTS} parts: send purpose, expires_after and file.", "body")

    async def _more(self) -> None:
        if not self._body.more:
            raise BadRequest("The form ends before its last boundary: send all of it.", "body")
        self._rest += await self._body.next()

    async def _take(self, count: int) -> bytes:
        while len(self._rest) < count:
            await self._more()
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    async def _head(self) -> bytes:
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > MAX_HEAD_BYTES:
                raise BadRequest(f"The headers of a part have more than {MAX_HEAD_BYTES} bytes.", "body")
            await self._more()
        head, self._rest = self._rest[:end], self._rest[end + 4 :]
        return head

    async def _until_mark(self) -> AsyncIterator[bytes]:
        """Yield what comes before the next boundary."""
        keep = len(self._mark) - 1  # bytes that may begin a boundary
        while (end := self._rest.find(self._mark)) < 0:
            if len(self._rest) > keep:
                chunk, self._rest = self._rest[:-keep], self._rest[-keep:]
                yield chunk
            await self._more()
        chunk, self._rest = self._rest[:end], self._rest[end + len(self._mark) :]
        if chunk:
            yield chunk


def _named(head: bytes) -> tuple[str, str | None]:
    match = _DISPOSITION.search(head)
    found = {} if match is None else {name.lower(): value for name, value in _PARAMETER.findall(match[1])}
    if b"name" not in found:
        raise BadRequest('A part has no header such as content-disposition: form-data; name="file".', "body")
    filename = found.get(b"filename")
    return _text(found[b"name"], "name"), None if filename is None else _text(filename, "filename")


def _text(value: bytes, param: str) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"The {param} of a part must be in UTF-8.", param) from None
    if len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise BadRequest(
            f"The {param} of a part must be at most {MAX_NAME_CHARS} printable characters: rename it.", param
        )
    return text
