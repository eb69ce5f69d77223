"""Describes the API: `/openapi.json`, made of the types that bodies are read as, and `/docs`, a page of the same.

A client, a code generator or a reader needs no key for them: they say what any server of this version does.
"""

from collections.abc import Mapping
from functools import cache
from html import escape
from typing import Any, NamedTuple

import orjson
from pydantic import TypeAdapter

from admission.outcome import Outcome
from gateway.anthropic.message_request import CountBody, MessagesBody
from gateway.api.conversations import ConversationBody, ItemsBody, MetadataBody
from gateway.api.endpoint import Call, Endpoint
from gateway.batches.objects import BatchBody, FileForm
from gateway.http.responses import encode_headers
from gateway.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.openai.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from gateway.openai.response_request import ResponsesBody
from gateway.version import VERSION

Json = dict[str, Any]

MAX_SHOWN_BOUND = 2**53  # largest bound shown; a larger one only says that the number fits 64 bits
REF = "#/components/schemas/{model}"
HTML = encode_headers(
    {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    }
)


class Operation(NamedTuple):
    """A method of a path: its summary and the type of its body."""

    method: str
    path: str
    summary: str
    body: Any = None
    content: str = "application/json"  # type of the body


ONE_CONVERSATION = "/v1/conversations/{conversation_id}"
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answers a conversation, as OpenAI's API and vLLM's do.", ChatBody),
    Operation("post", "/v1/completions", "Continues a text.", CompletionBody),
    Operation("post", "/v1/responses", "Answers items by items, and stores them for the next turn.", ResponsesBody),
    Operation("get", "/v1/responses/{response_id}", "Returns a stored response."),
    Operation("delete", "/v1/responses/{response_id}", "Deletes a stored response."),
    Operation("get", "/v1/responses/{response_id}/input_items", "Lists what a stored response was asked."),
    Operation("post", "/v1/responses/{response_id}/cancel", "Cancels a response in the background."),
    Operation("post", "/v1/conversations", "Creates a conversation.", ConversationBody),
    Operation("get", ONE_CONVERSATION, "Returns a conversation."),
    Operation("post", ONE_CONVERSATION, "Replaces the metadata of a conversation.", MetadataBody),
    Operation("delete", ONE_CONVERSATION, "Deletes a conversation with its items."),
    Operation("get", f"{ONE_CONVERSATION}/items", "Lists the items of a conversation."),
    Operation("post", f"{ONE_CONVERSATION}/items", "Adds items to a conversation.", ItemsBody),
    Operation("get", f"{ONE_CONVERSATION}/items/{{item_id}}", "Returns one item."),
    Operation("delete", f"{ONE_CONVERSATION}/items/{{item_id}}", "Removes one item from a conversation."),
    Operation("post", "/v1/files", "Uploads the input of a batch.", FileForm, "multipart/form-data"),
    Operation("get", "/v1/files", "Lists files, the newest first."),
    Operation("get", "/v1/files/{file_id}", "Returns one file."),
    Operation("delete", "/v1/files/{file_id}", "Deletes a file."),
    Operation("get", "/v1/files/{file_id}/content", "Returns what a file holds."),
    Operation("post", "/v1/batches", "Has each line of a file answered, as the machine has time.", BatchBody),
    Operation("get", "/v1/batches", "Lists batches, the newest first."),
    Operation("get", "/v1/batches/{batch_id}", "Returns one batch."),
    Operation("post", "/v1/batches/{batch_id}/cancel", "Cancels a batch, and keeps what is done."),
    Operation("post", "/v1/messages", "Answers a conversation, as Anthropic's API does.", MessagesBody),
    Operation("post", "/v1/messages/count_tokens", "Counts the tokens of a conversation.", CountBody),
    Operation("post", "/v1/embeddings", "Embeds texts, where the server has a model for it.", EmbeddingsBody),
    Operation("post", "/v1/score", "Scores texts against others.", ScoreBody),
    Operation("post", "/v1/rerank", "Ranks documents by a query.", RerankBody),
    Operation("get", "/v1/models", "Lists the models that the key may use."),
    Operation("get", "/v1/models/{model}", "Returns one model."),
    Operation("get", "/v1/limits", "Returns the limits of the key, and what is left of them."),
    Operation("post", "/tokenize", "Returns the token ids of a text or of a conversation.", TokenizeBody),
    Operation("post", "/detokenize", "Returns the text of token ids.", DetokenizeBody),
    Operation("get", "/tokenizer_info", "Returns the tokenizer's configuration and chat template."),
)
_TEXT_OR_IDS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
_MANY: Json = {"anyOf": [*_TEXT_OR_IDS["anyOf"], {"type": "array", "items": _TEXT_OR_IDS}]}
_TEXTS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_ITEMS: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_READ_BY_HAND: Mapping[tuple[Any, str], Json] = {  # fields whose types are not those of the body's declaration
    (CompletionBody, "prompt"): _MANY,
    (EmbeddingsBody, "input"): _MANY,
    (ResponsesBody, "input"): _ITEMS,
    (ScoreBody, "text_1"): _TEXTS,
    (ScoreBody, "text_2"): _TEXTS,
    (DetokenizeBody, "tokens"): {"type": "array", "items": {"type": "integer"}},
}


@cache
def description() -> Json:
    """Returns the API as OpenAPI 3.1 has it."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    adapters: Any = [(body, "validation", TypeAdapter(body)) for body in bodies]
    found, defined = TypeAdapter.json_schemas(adapters, ref_template=REF)
    schemas: Json = dict(defined.get("$defs", {}))
    paths: Json = {}
    for operation in OPERATIONS:
        told: Json = {"summary": operation.summary, "responses": _responses(operation)}
        if operation.body is not None:
            schema = found[operation.body, "validation"]
            told["requestBody"] = {"required": True, "content": {operation.content: {"schema": schema}}}
            properties = _resolved(schema, schemas)["properties"]
            for name in [name for body, name in _READ_BY_HAND if body is operation.body]:
                properties[name] = _READ_BY_HAND[operation.body, name]
        names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
        paths.setdefault(operation.path, {})[operation.method] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": VERSION, "summary": "A multi-tenant gateway with the engine inside."},
        "paths": paths,
        "security": [{"bearer": []}, {"x-api-key": []}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


@cache
def written() -> bytes:
    return orjson.dumps(description())


def _responses(operation: Operation) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if operation.body is not None and "stream" in operation.body.__annotations__:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"200": {"description": "The answer.", "content": content}, "default": {"description": "A typed error."}}


def _resolved(schema: Json, schemas: Json) -> Json:
    name = schema.get("$ref", "").rpartition("/")[2]
    return schemas[name] if name else schema


@cache
def page() -> bytes:
    """Returns the page: each operation with the fields of its body."""
    api = description()
    parts = [_operation(operation, api) for operation in OPERATIONS]
    return f"{_HEAD}<h1>Sluice {escape(VERSION)}</h1><p>{_INTRODUCTION}</p>{''.join(parts)}</html>".encode()


def _operation(operation: Operation, api: Json) -> str:
    title = (
        f"<h2><code>{operation.method.upper()} {escape(operation.path)}</code></h2><p>{escape(operation.summary)}</p>"
    )
    body = api["paths"][operation.path][operation.method].get("requestBody")
    if body is None:
        return title
    schemas = api["components"]["schemas"]
    schema = _resolved(next(iter(body["content"].values()))["schema"], schemas)
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind(field))}<td>{'required' if name in required else ''}"
        for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required)
    ]
    return f"{title}<table>{''.join(rows)}</table>"


def kind(schema: Json) -> str:
    """The type of a field in words, without the null that any optional field may be."""
    if "anyOf" in schema:
        kinds = [kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"array of {kind(schema.get('items', {}))}"
    bounds = [
        f"{word} {schema[name]}"
        for name, word in (("minimum", "at least"), ("maximum", "at most"))
        if abs(schema.get(name, MAX_SHOWN_BOUND)) < MAX_SHOWN_BOUND
    ]
    return ", ".join([str(schema.get("const", schema.get("type", "any"))), *bounds])


_INTRODUCTION = (
    'Generated from the types that bodies are read as; <a href="openapi.json">openapi.json</a> says the same to '
    "programs. A key is sent as <code>Authorization: Bearer</code> or as <code>x-api-key</code>."
)
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Sluice API</title>
<meta name="viewport" content="width=device-width"><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }
h2 { margin: 2.2rem 0 .2rem; font-size: 1.05rem } table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #8884; padding: .15rem .6rem .15rem 0; vertical-align: top; overflow-wrap: anywhere }
td:last-child { color: #888; text-align: right }
</style>"""


class OpenApiEndpoint(Endpoint):
    async def answer(self, call: Call) -> Outcome:
        return await self.complete(call, written())


class DocsEndpoint(Endpoint):
    async def answer(self, call: Call) -> Outcome:
        return await self.complete(call, page(), headers=HTML)
