"""Responses: chats whose input and output are items."""

from typing import cast

from gateway.api.chat_dialect import ChatDialect
from gateway.http.json_body import JsonBody
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.limits import Limits
from gateway.openai.replies import Choice, Identity, StreamEncoder, TokenUsage
from gateway.openai.requests import ChatRequest
from gateway.openai.response_events import ResponseEvents, ResponseIdentity, whole_response
from gateway.openai.response_request import ResponseRequest, parse_response_request


class ResponseDialect(ChatDialect):
    """Items, which a response answers."""

    prompt_param = "input"
    tells_content_alone = True

    def parse(self, body: JsonBody, limits: Limits) -> ResponseRequest:
        return parse_response_request(body, limits)

    def identify(self, request: ChatRequest) -> Identity:
        return ResponseIdentity.of_response(request.model, cast(ResponseRequest, request).echoed)

    def chunks(
        self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage | None = None
    ) -> StreamEncoder:
        return ResponseEvents(cast(ResponseIdentity, identity), message)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return whole_response(cast(ResponseIdentity, identity), choices[0], usage)
