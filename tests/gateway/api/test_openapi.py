"""The description of the API says what the server reads."""

import re

from jsonschema import Draft202012Validator
from starlette.applications import Starlette

from backend.text.tokenizer import Tokenizer
from gateway.api.openapi import OPERATIONS, description, kind, page
from tests.gateway.paper_gateway import Gateway

UNTOLD = {  # of operators, of other servers' names for the same, and of the description itself
    "/docs", "/openapi.json", "/version", "/v1/loads", "/server_info", "/get_server_info", "/model_info",
    "/get_model_info", "/score", "/rerank", "/v2/rerank",
}  # fmt: skip


async def test_every_path_of_tenants_is_described_and_no_other(embedded_tokenizer: Tokenizer) -> None:
    app = Gateway(embedded_tokenizer).app._app  # type: ignore[attr-defined]
    assert isinstance(app, Starlette)
    served = {
        (method.lower(), re.sub(r"\{response\}", "{response_id}", path.replace(":path", "")))
        for route in app.routes
        for path, method in [(route.path, method) for method in route.methods - {"HEAD"}]  # type: ignore[attr-defined]
    }
    assert {one for one in served if one[1] not in UNTOLD} == {(one.method, one.path) for one in OPERATIONS}


def test_bodies_that_are_read_are_valid_by_the_description() -> None:
    api = description()

    def validator(path: str) -> Draft202012Validator:
        schema = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return Draft202012Validator({**schema, "components": api["components"]})

    said = [{"role": "user", "content": "Hello!"}]
    for path, valid, wrong in (
        ("/v1/chat/completions", {"model": "m", "messages": said, "n": 2}, {"model": "m", "messages": said, "n": 0}),
        ("/v1/completions", {"model": "m", "prompt": [[1, 2], "three"]}, {"model": "m", "prompt": {}}),
        ("/v1/responses", {"model": "m", "input": [{"type": "message"}]}, {"model": "m", "input": 5}),
        ("/v1/messages", {"model": "m", "messages": said, "max_tokens": 5}, {"model": "m", "messages": said}),
        ("/v1/embeddings", {"model": "m", "input": ["a"]}, {"model": "m", "input": ["a"], "encoding_format": "x"}),
        ("/v1/rerank", {"model": "m", "query": "q", "documents": ["d"]}, {"model": "m", "query": "q"}),
    ):
        assert validator(path).is_valid(valid), path
        assert not validator(path).is_valid(wrong), path


def test_the_page_tells_each_operation_and_runs_nothing() -> None:
    text = page().decode()
    assert all(f"{one.method.upper()} {one.path}" in text for one in OPERATIONS)
    assert "<script" not in text
    assert kind({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 8}, {"type": "null"}]}) == (
        "integer, at least 1, at most 8"
    )
