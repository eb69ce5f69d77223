"""Conversations: items that tenants keep here, and to which each response of a conversation adds its own.

A conversation is stored as one, beside the responses and within their bytes: sealed, compressed, and written anew at
each change, in place of the revision that was read.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Annotated, Any

import orjson
from pydantic import Field, with_config
from starlette.routing import Route
from typing_extensions import TypedDict  # as in `gateway.openai.bodies`

from gateway.api.endpoint import Call, StoredEndpoint
from gateway.api.frontend import Frontend
from gateway.api.stored_responses import StoredResponses, listed, page_of
from gateway.errors import BadRequest, ConversationNotFound, Overloaded, Unsatisfiable
from gateway.http.json_body import EXACT, BodyType, JsonBody
from gateway.openai.response_items import REFERENCE, Item, item_id, read_messages, typed_items
from gateway.openai.response_request import Metadata
from gateway.quoting import quoted
from gateway.tenants.effective_policy import EffectivePolicy

Json = dict[str, Any]

MAX_ADDED_ITEMS = 20  # by one call, as in OpenAI's API
MAX_CONVERSATION_ITEMS = 2048  # as of an input
CHANGE_TRIES = 16  # of a change, while others change the same conversation
_ID = re.compile(r"conv_[0-9a-f]{48}")

_Items = Annotated[list[Any], Field(max_length=MAX_ADDED_ITEMS)]


@with_config(EXACT)
class ConversationBody(TypedDict, total=False):
    items: _Items | None
    metadata: Metadata | None


@with_config(EXACT)
class MetadataBody(TypedDict):
    metadata: Metadata | None


@with_config(EXACT)
class ItemsBody(TypedDict):
    items: Annotated[_Items, Field(min_length=1)]


_NEW = BodyType[ConversationBody](ConversationBody)
_METADATA, _ITEMS = BodyType[MetadataBody](MetadataBody), BodyType[ItemsBody](ItemsBody)


@dataclass(slots=True)
class StoredConversation:
    """A conversation, whose items stay JSON until they are asked for: thousands would hold the event loop."""

    fields: Json  # id, created_at, metadata, revision; and `items`, the ids of its items
    lines: list[bytes]  # an item each

    def add(self, items: Sequence[Item]) -> None:
        self.fields["items"] += [item["id"] for item in items]
        self.lines += map(orjson.dumps, items)

    def item(self, name: str) -> Json:
        """Return the item with this id. Raises `ConversationNotFound`."""
        item: Json = orjson.loads(self.lines[self._place(name)])
        return item

    def remove(self, name: str) -> None:
        """Remove the item with this id. Raises `ConversationNotFound`."""
        place = self._place(name)
        del self.fields["items"][place], self.lines[place]

    def _place(self, name: str) -> int:
        names: list[str] = self.fields["items"]
        if name not in names:
            told = f"The conversation {quoted(self.fields['id'])} has no item {quoted(name)}."
            raise ConversationNotFound(told, "item_id")
        return names.index(name)

    def written(self) -> bytes:
        return b"\n".join((orjson.dumps(self.fields), *self.lines))

    @staticmethod
    def parsed(written: bytes) -> "StoredConversation":
        fields, *lines = written.split(b"\n")
        return StoredConversation(orjson.loads(fields), lines)


@dataclass(frozen=True, slots=True)
class StoredConversations:
    """The conversations of all tenants. Every call raises `ApiError` if the store does not answer."""

    stored: StoredResponses

    async def create(
        self, policy: EffectivePolicy, metadata: Mapping[str, str], items: Sequence[Item]
    ) -> StoredConversation:
        """Store a new conversation, and return it. Raises `Unsatisfiable`."""
        name, now = f"conv_{urandom(24).hex()}", int(time.time())
        conversation = StoredConversation({"id": name, "created_at": now, "metadata": metadata, "items": []}, [])
        conversation.add(items)
        await self._write(policy, conversation, None)
        return conversation

    async def read(self, tenant: str, name: str) -> StoredConversation:
        """A conversation. Raises `ConversationNotFound` alike for an unknown, a foreign and an expired one."""
        conversation = await self.stored.get(tenant, name, StoredConversation.parsed) if _ID.fullmatch(name) else None
        if conversation is None:
            raise _missing(name)
        return conversation

    async def change(
        self, policy: EffectivePolicy, name: str, change: Callable[[StoredConversation], object]
    ) -> StoredConversation:
        """Have `change` made to a conversation, perhaps to several revisions, and return the stored one. Raises
        `ConversationNotFound`, and `Unsatisfiable` if the tenant has no room for it.
        """
        for _ in range(CHANGE_TRIES):
            conversation = await self.read(policy.name, name)
            replaced = conversation.fields["revision"]
            change(conversation)
            if await self._write(policy, conversation, replaced):
                return conversation
        raise Overloaded("Others change this conversation at the same time.", retry_after=1.0)

    async def add(self, policy: EffectivePolicy, name: str, items: Sequence[Item]) -> StoredConversation:
        return await self.change(policy, name, lambda one: one.add(items))

    async def delete(self, tenant: str, name: str) -> None:
        if not _ID.fullmatch(name) or not await self.stored.frontend.engine.delete_response(tenant, name):
            raise _missing(name)

    async def _write(self, policy: EffectivePolicy, conversation: StoredConversation, replaced: str | None) -> bool:
        """Returns False if another revision than `replaced` is there. Raises `Unsatisfiable`."""
        if len(conversation.lines) > MAX_CONVERSATION_ITEMS:
            told = f"A conversation has at most {MAX_CONVERSATION_ITEMS} items: begin another one."
            raise Unsatisfiable(told, "items")
        name, revision = conversation.fields["id"], urandom(8).hex()
        conversation.fields["revision"] = revision
        stored = await self.stored.put(policy, name, revision, conversation.written(), replaced)
        if stored == "too_large":
            raise Unsatisfiable(
                "Your tenant's limit stored_responses.bytes has no room for this conversation: begin another one, or "
                "have the limit raised.",
                "items",
            )
        return stored == "ok"


def _missing(name: str) -> ConversationNotFound:
    told = f"There is no conversation {quoted(name)}: it was never stored, or has expired."
    return ConversationNotFound(told, "conversation")


def _shown(conversation: StoredConversation) -> Json:
    named = {name: conversation.fields[name] for name in ("id", "created_at", "metadata")}
    return {"object": "conversation", **named}


def stored_items(items: Sequence[Item]) -> list[Item]:
    """Items of a client as a conversation keeps them: each with an id, and a content of parts."""
    stem, kept = urandom(24).hex(), list[Item]()
    for ordinal, item in enumerate(items):
        kept.append({**item, "id": item_id(item["type"], stem, ordinal)})
        if item["type"] == "message":
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            if isinstance(item["content"], str):
                kept[-1]["content"] = [{"type": kind, "text": item["content"]}]
            kept[-1]["status"] = "completed"
    return kept


class _ConversationEndpoint(StoredEndpoint):
    def __init__(self, frontend: Frontend) -> None:
        super().__init__(frontend)
        self._conversations = StoredConversations(StoredResponses(frontend))

    async def read_checked(self, call: Call, policy: EffectivePolicy, form: BodyType[Any]) -> Json:
        """The body, with its items checked. Raises `BadRequest`."""

        def parse(body: JsonBody) -> Json:
            read: Json = form.read(body)
            ignored = read["ignored"] = self.frontend.model.limits.ignored()
            if items := read.get("items"):
                read["items"] = typed_items(items, "items")
                for index, item in enumerate(read["items"]):
                    if item["type"] == REFERENCE:
                        told = f"items[{index}] must be an item itself, not a reference to one."
                        raise BadRequest(told, f"items[{index}].type")
                read_messages(read["items"], ignored, "items")
                read["items"] = stored_items(read["items"])
            return read

        checked = await self.read(call, policy, parse)
        self.tell_ignored(call, checked["ignored"])
        return checked


class ConversationsEndpoint(_ConversationEndpoint):
    """Makes a conversation: POST /v1/conversations."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        asked = await self.read_checked(call, policy, _NEW)
        return _shown(await self._conversations.create(policy, asked.get("metadata") or {}, asked.get("items") or []))


class ConversationEndpoint(_ConversationEndpoint):
    """Answers GET, POST, which replaces the metadata, and DELETE of one conversation."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        name, method = call.scope["path_params"]["conversation_id"], call.scope["method"]
        if method == "POST":
            asked = await self.read_checked(call, policy, _METADATA)
            metadata = asked["metadata"] or {}
            return _shown(
                await self._conversations.change(policy, name, lambda one: one.fields.update(metadata=metadata))
            )
        if method == "DELETE":
            await self._conversations.delete(policy.name, name)
            return {"id": name, "object": "conversation.deleted", "deleted": True}
        return _shown(await self._conversations.read(policy.name, name))


class ConversationItemsEndpoint(_ConversationEndpoint):
    """Answers GET of a page of a conversation's items, and POST of further ones."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        name = call.scope["path_params"]["conversation_id"]
        if call.scope["method"] == "GET":
            conversation = await self._conversations.read(policy.name, name)
            return page_of(conversation.fields["items"], call, conversation.item)
        items = (await self.read_checked(call, policy, _ITEMS))["items"]
        await self._conversations.add(policy, name, items)
        return listed(items, 0, len(items))


class ConversationItemEndpoint(_ConversationEndpoint):
    """Answers GET and DELETE of one item; the latter with its conversation."""

    async def told(self, call: Call, policy: EffectivePolicy) -> Json:
        name, item = (call.scope["path_params"][one] for one in ("conversation_id", "item_id"))
        if call.scope["method"] == "GET":
            return (await self._conversations.read(policy.name, name)).item(item)
        return _shown(await self._conversations.change(policy, name, lambda one: one.remove(item)))


def make_conversation_routes(frontend: Frontend) -> list[Route]:
    """The routes of conversations."""
    one = "/v1/conversations/{conversation_id}"
    return [
        Route("/v1/conversations", ConversationsEndpoint(frontend), methods=["POST"]),
        Route(one, ConversationEndpoint(frontend), methods=["GET", "POST", "DELETE"]),
        Route(f"{one}/items", ConversationItemsEndpoint(frontend), methods=["GET", "POST"]),
        Route(f"{one}/items/{{item_id}}", ConversationItemEndpoint(frontend), methods=["GET", "DELETE"]),
    ]
