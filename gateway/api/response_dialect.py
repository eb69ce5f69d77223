"""Responses: chats whose input and output are items, and which the server may store for the turns that follow."""

from dataclasses import replace
from typing import cast

import orjson

from gateway.api.chat_dialect import ChatDialect
from gateway.api.dialects import Prompt
from gateway.api.frontend import Frontend
from gateway.api.stored_responses import StoredResponses
from gateway.errors import BadRequest, ContextLengthExceeded, PreviousResponseNotFound
from gateway.http.json_body import JsonBody
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.conversation import MESSAGE_BYTES
from gateway.openai.limits import Limits
from gateway.openai.replies import Choice, Identity, StreamEncoder, TokenUsage
from gateway.openai.requests import ChatRequest
from gateway.openai.response_events import Json, ResponseEvents, ResponseIdentity, whole_response
from gateway.openai.response_items import REFERENCE, Item, item_id, read_messages
from gateway.openai.response_request import ResponseRequest, parse_response_request, with_instructions
from gateway.tenants.effective_policy import EffectivePolicy

SHORTEST_CUT = 0.9  # of the messages that may be left out: what is kept of them at the next try


class ResponseDialect(ChatDialect):
    """Items, which a response answers."""

    prompt_param = "input"
    tells_content_alone = True

    def __init__(self, frontend: Frontend) -> None:
        self._stored = StoredResponses(frontend)

    def parse(self, body: JsonBody, limits: Limits) -> ResponseRequest:
        return parse_response_request(body, limits)

    async def prompts(self, request: ChatRequest, tenant: str, frontend: Frontend) -> list[Prompt]:
        asked = cast(ResponseRequest, request)
        if asked.previous is not None or any(item["type"] == REFERENCE for item in asked.items):
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
        """Store a response, if that is asked for. Returns it as it says whether it is."""
        if response["store"]:
            given = [
                {**item, "id": item_id(item["type"], identity.id, ordinal)}
                for ordinal, item in enumerate(identity.items)
            ]
            response["store"] = await self._stored.keep(policy, response, given)
        return response

    async def _look_up(self, request: ResponseRequest, tenant: str, frontend: Frontend) -> None:
        """Put the items that a request refers to, and those of the turns before it, into its conversation."""
        items: list[Item] = []
        if request.previous is not None:
            turns = await self._stored.turns(tenant, request.previous)
            if turns is None:
                raise PreviousResponseNotFound(
                    f"There is no response {request.previous[:80]!r} to go on from: it was never stored, or it or one "
                    "before it is not any more. Send the conversation as input.",
                    "previous_response_id",
                )
            items = [item for turn in turns for item in (*turn.input, *turn.response["output"])]
        for index, item in enumerate(request.items):
            if item["type"] == REFERENCE:
                found = await self._stored.item(tenant, item["id"])
                if found is None:
                    raise BadRequest(
                        f"input[{index}] names an item that is not stored: send the item itself.", f"input[{index}].id"
                    )
                request.items[index] = found
        items += request.items
        size = MESSAGE_BYTES * len(items)
        read = await frontend.body_reader.offload(tenant, size, lambda: read_messages(items, None))
        messages = with_instructions(request.instructions, read)
        request.conversation = replace(request.conversation, messages=messages)


def _leave_out_oldest(request: ResponseRequest) -> bool:
    """Leave out the oldest messages besides instructions and the last one, a tenth of those at least. Returns whether
    there were any. The result of a call is left out with it.
    """
    messages = request.conversation.messages
    kept = 1 if request.instructions else 0
    rest = messages[kept:]
    first = max(1, len(rest) - int(len(rest) * SHORTEST_CUT))
    while first < len(rest) and rest[first]["role"] == "tool":
        first += 1
    if first >= len(rest):
        return False
    request.conversation = replace(request.conversation, messages=(*messages[:kept], *rest[first:]))
    return True
