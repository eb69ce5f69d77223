"""Responses: chats whose input and output are items, and which the server may store for later turns."""

from dataclasses import replace
from typing import cast

import orjson

from gateway.api.background_responses import BackgroundRun
from gateway.api.chat_dialect import ChatDialect
from gateway.api.conversations import StoredConversations, stored_items
from gateway.api.dialects import Prompt
from gateway.api.endpoint import Call
from gateway.api.frontend import Frontend
from gateway.api.stored_responses import OPEN, StoredResponses, given_items, response_of
from gateway.errors import ApiError, BadRequest, ContextLengthExceeded, PreviousResponseNotFound
from gateway.http.json_body import JsonBody
from gateway.http.request_scope import RequestScope
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.conversation import MESSAGE_BYTES
from gateway.openai.foreign_fields import Ignored
from gateway.openai.limits import Limits
from gateway.openai.replies import Choice, Identity, StreamEncoder, TokenUsage
from gateway.openai.requests import ChatRequest, GenerationRequest
from gateway.openai.response_events import Json, ResponseEvents, ResponseIdentity, whole_response
from gateway.openai.response_items import REFERENCE, Item, read_messages
from gateway.openai.response_request import ResponseRequest, parse_response_request, with_instructions
from gateway.quoting import quoted
from gateway.tenants.effective_policy import EffectivePolicy
from quotas.stored import MAX_TURNS

KEPT_SHARE_OF_MESSAGES = 0.75  # share of the messages kept at the next try
MAX_REFERENCED_RESPONSES = 32  # stored responses whose items one request may name; each is read and decrypted


class ResponseDialect(ChatDialect):
    """The dialect of /v1/responses: input items, and output items as the answer."""

    prompt_param = "input"
    tells_content_alone = True

    def __init__(self, frontend: Frontend) -> None:
        self._stored = StoredResponses(frontend)
        self._conversations = StoredConversations(self._stored)

    def parse(self, body: JsonBody, limits: Limits) -> ResponseRequest:
        return parse_response_request(body, limits)

    async def prompts(self, request: ChatRequest, tenant: str, frontend: Frontend) -> list[Prompt]:
        asked = cast(ResponseRequest, request)
        is_continued = asked.previous is not None or asked.conversation_name is not None
        if is_continued or any(item["type"] == REFERENCE for item in asked.items):
            await self._look_up(asked, tenant, frontend)
        context = frontend.model.limits.max_model_len
        room = min(request.sampling.max_tokens or 1, context // 2)  # for the answer
        sampling, grammar_field = request.sampling, request.grammar_field
        while True:
            request.sampling, request.grammar_field = sampling, grammar_field  # as they were before a grammar of calls
            try:
                prompts = await super().prompts(request, tenant, frontend)
            except ContextLengthExceeded:
                if not asked.truncates or not _leave_out_oldest(asked):
                    raise
            else:
                is_short = len(prompts[0].token_ids) <= context - room
                if is_short or not asked.truncates or not _leave_out_oldest(asked):
                    return prompts

    def identify(self, request: ChatRequest) -> Identity:
        asked = cast(ResponseRequest, request)
        return ResponseIdentity.of_response(request.model, dict(asked.echoed), asked.items)

    def in_background(
        self, call: Call, scope: RequestScope, policy: EffectivePolicy, request: GenerationRequest, identity: Identity
    ) -> BackgroundRun:
        is_streamed = cast(ResponseRequest, request).is_streamed
        known = cast(ResponseIdentity, identity)
        run = BackgroundRun(self._stored, call, scope, policy, known, is_streamed)
        known.completed = run.completed
        return run

    def chunks(
        self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage | None = None
    ) -> StreamEncoder:
        return ResponseEvents(cast(ResponseIdentity, identity), message)

    async def whole(
        self, policy: EffectivePolicy, identity: Identity, choices: list[Choice], usage: TokenUsage
    ) -> bytes:
        known = cast(ResponseIdentity, identity)
        return orjson.dumps(await self._kept(policy, known, whole_response(known, choices[0], usage)))

    async def end(self, policy: EffectivePolicy, chunks: StreamEncoder, usage: TokenUsage) -> bytes:
        events = cast(ResponseEvents, chunks)
        return events.ended(await self._kept(policy, events.identity, events.response(usage)))

    async def _kept(self, policy: EffectivePolicy, identity: ResponseIdentity, response: Json) -> Json:
        """Add the response to its conversation, and store it if the request asks for it; returns it with the fields
        `conversation` and `store` set to the result.
        """
        given = given_items(identity)
        if response["conversation"] is not None:
            added = [*stored_items(given), *response["output"]]
            try:
                await self._conversations.add(policy, response["conversation"]["id"], added)
            except ApiError:
                response["conversation"] = None
        if identity.completed is not None:
            await identity.completed(response)
        elif response["store"]:
            try:
                response["store"] = await self._stored.keep(policy, response, given) == "ok"
            except ApiError:
                response["store"] = False
        return response

    async def _look_up(self, request: ResponseRequest, tenant: str, frontend: Frontend) -> None:
        """Insert the referenced items, and those of earlier turns, into the conversation."""
        items, known = list[Item | bytes](), dict[str, Item | bytes]()  # bytes: as JSON
        if request.conversation_name is not None:
            conversation = await self._conversations.read(tenant, request.conversation_name)
            items = [*conversation.lines]
            known = dict(zip(conversation.fields["items"], items, strict=True))
        if request.previous is not None:
            turns = await self._stored.turns(tenant, request.previous)
            if turns is None:
                raise PreviousResponseNotFound(
                    f"There is no response {quoted(request.previous)} to continue: it, or a response before it, was "
                    f"never stored or has expired, or {MAX_TURNS} are before it. Send the conversation as input.",
                    "previous_response_id",
                )
            if turns[-1].response["status"] in OPEN:
                told = f"The response {quoted(request.previous)} has not ended: wait for it, or cancel it."
                raise BadRequest(told, "previous_response_id")
            earlier = [item for turn in turns for item in (*turn.input, *turn.response["output"])]
            items, known = [*earlier], {item["id"]: item for item in earlier}
        stored: dict[str, dict[str, Item]] = {}  # items of responses that were read
        for index, item in enumerate(request.items):
            if item["type"] == REFERENCE:
                response = None if item["id"] in known else response_of(item["id"])
                if response is not None and response not in stored and len(stored) < MAX_REFERENCED_RESPONSES:
                    stored[response] = await self._stored.items(tenant, response)
                found = known.get(item["id"]) or stored.get(response or "", {}).get(item["id"])
                if found is None:
                    raise BadRequest(
                        f"input[{index}] names an item that is not stored, or is one of more than "
                        f"{MAX_REFERENCED_RESPONSES} responses: send the item itself.",
                        f"input[{index}].id",
                    )
                request.items[index] = _parsed(found)
        items += request.items
        size = MESSAGE_BYTES * len(items)
        read = await frontend.body_reader.offload(tenant, size, lambda: read_messages(map(_parsed, items), Ignored()))
        messages = with_instructions(request.instructions, read)
        request.conversation = replace(request.conversation, messages=messages)


def _parsed(item: Item | bytes) -> Item:
    parsed: Item = orjson.loads(item) if isinstance(item, bytes) else item
    return parsed


def _leave_out_oldest(request: ResponseRequest) -> bool:
    """Drop the oldest messages up to a user's, except leading system messages and the last message. Returns False if
    there is nothing to drop.
    """
    messages = request.conversation.messages
    kept = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    rest = messages[kept:]
    first = max(1, len(rest) - int(len(rest) * KEPT_SHARE_OF_MESSAGES))
    first = next((n for n in range(first, len(rest)) if rest[n]["role"] == "user"), len(rest) - 1)
    if first < 1:
        return False
    request.conversation = replace(request.conversation, messages=(*messages[:kept], *rest[first:]))
    return True
