"""Anthropic's messages: chats whose content is blocks."""

from typing import cast

from backend.text.response_templates.template import REASONING
from gateway.anthropic.message_events import MessageEvents, MessageIdentity, whole_message
from gateway.anthropic.message_request import parse_message_request
from gateway.api.chat_dialect import ChatDialect
from gateway.api.frontend import Frontend
from gateway.http.json_body import JsonBody
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.limits import Limits
from gateway.openai.replies import Choice, Identity, StreamEncoder, TokenUsage
from gateway.openai.requests import ChatRequest


class MessageDialect(ChatDialect):
    """Messages of blocks, which another message answers."""

    def parse(self, body: JsonBody, limits: Limits) -> ChatRequest:
        return parse_message_request(body, limits)

    def bound(self, request: ChatRequest, most_reasoning: int | None, frontend: Frontend) -> None:
        """Ignore the budget if the model does not reason: clients send one to every model."""
        template = frontend.tokenizer.response_template
        if request.thinking_budget is not None and (template is None or template.field(REASONING) is None):
            request.thinking_budget = None
        super().bound(request, most_reasoning, frontend)

    def identify(self, request: ChatRequest) -> Identity:
        return MessageIdentity.of_message(request.model)

    def chunks(
        self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage | None = None
    ) -> StreamEncoder:
        return MessageEvents(cast(MessageIdentity, identity), message)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return whole_message(cast(MessageIdentity, identity), choices[0], usage)
