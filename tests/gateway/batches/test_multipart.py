"""A form is read as its parts, however its bytes are cut up on the way."""

import asyncio
from contextlib import aclosing, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from gateway.batches.multipart import FormReader, boundary_of
from gateway.errors import BadRequest
from gateway.http.request_scope import BodyParts
from tests.examples import examples

LIMIT = 10**6


async def parts_of(boundary: bytes, pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return messages.pop(0)

    body = BodyParts({"type": "http", "headers": []}, receive, LIMIT, 60.0)
    async with aclosing(FormReader(boundary, body).parts()) as form:
        return [(part.name, part.filename, b"".join([chunk async for chunk in part.chunks])) async for part in form]


def form_of(boundary: bytes, fields: list[tuple[str, bytes]]) -> bytes:
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"; filename="f"\r\nX: y\r\n\r\n%b\r\n'
        % (boundary, name.encode(), value)
        for name, value in fields
    ]
    return b"".join([*parts, b"--%b--\r\nepilogue" % boundary])


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["file", "purpose", "é"]), st.one_of(st.binary(max_size=90), st.just(b"\r\n--x-\r\n--"))
        ),
        max_size=5,
    ),
    st.lists(st.integers(0, 700), max_size=12),
)
def test_a_form_is_its_parts_however_it_is_cut(fields: list[tuple[str, bytes]], cuts: list[int]) -> None:
    boundary = b"x-1"
    whole = form_of(boundary, [(name, value) for name, value in fields if b"--x-1" not in value])
    places = sorted({0, *[cut for cut in cuts if cut < len(whole)], len(whole)})
    pieces = [whole[start:end] for start, end in pairwise(places)]
    found = asyncio.run(parts_of(boundary, pieces))
    assert found == [(name, "f", value) for name, value in fields if b"--x-1" not in value]


@settings(max_examples=examples(150))
@given(st.binary(max_size=400), st.integers(1, 60))
def test_any_bytes_are_parts_or_a_typed_error(junk: bytes, size: int) -> None:
    body = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + junk
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    with suppress(BadRequest):
        asyncio.run(parts_of(b"x", pieces))


@pytest.mark.parametrize("given", [b"", b"text/plain", b"multipart/form-data", b'multipart/form-data; boundary=""'])
def test_a_type_without_a_boundary_is_refused(given: bytes) -> None:
    with pytest.raises(BadRequest):
        boundary_of(given)


def test_a_boundary_may_be_quoted_and_stand_behind_others() -> None:
    assert boundary_of(b'multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    assert boundary_of(b"Multipart/Form-Data;boundary=ab") == b"ab"
