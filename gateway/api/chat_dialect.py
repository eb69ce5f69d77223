"""Chats: how their prompts are made, what constrains their answers, and how these are parsed and written."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from backend.text.response_templates.parser import ResponseParser
from backend.text.response_templates.template import REASONING
from gateway.api.dialects import Dialect, Prompt
from gateway.api.frontend import Frontend
from gateway.http.json_body import JsonBody
from gateway.openai.answer_message import AnswerMessage, MessageChunks
from gateway.openai.chat_grammar import chat_grammar, needs_grammar
from gateway.openai.limits import Limits
from gateway.openai.logprobs import Spelling, ToldToken, chat_logprobs
from gateway.openai.replies import ChatChunks, Choice, Identity, StreamEncoder, TokenUsage, chat_completion
from gateway.openai.requests import ChatRequest, parse_chat_request


class ChatDialect(Dialect):
    """A conversation, which an assistant's message answers."""

    operation = "chat"
    prompt_param = "messages"
    no_logprobs: Mapping[str, None] = MappingProxyType({"refusal": None})

    def parse(self, body: JsonBody, limits: Limits) -> ChatRequest:
        return parse_chat_request(body, limits)

    async def prompts(self, request: ChatRequest, tenant: str, frontend: Frontend) -> list[Prompt]:
        text = await frontend.render(tenant, request.conversation, request.kept_tokens is not None)
        prompt = Prompt(await self.encode(request, frontend, tenant, text), ())
        template = frontend.tokenizer.response_template
        if template is not None:
            prompt.begun = template.begun(text)
        if needs_grammar(request, template):
            tools, grammar = request.conversation.tools, request.sampling.grammar
            size = (tools.size if tools else 0) + (len(grammar.source) if grammar else 0)
            write = partial(chat_grammar, request, frontend.tokenizer, frontend.model.end_tokens, prompt.begun)
            grammar = await frontend.body_reader.offload(tenant, size, write)
            request.sampling = replace(request.sampling, grammar=grammar)
            if request.grammar_field is None:
                request.grammar_field = "tools" if tools is not None else "thinking_token_budget"
        elif request.sampling.grammar is not None:
            prompt.is_content = True
        return [prompt]

    def bound(self, request: ChatRequest, most_reasoning: int | None, frontend: Frontend) -> None:
        template, asked = frontend.tokenizer.response_template, request.thinking_budget
        if most_reasoning is not None and template is not None and template.field(REASONING):
            request.thinking_budget = most_reasoning if asked is None else min(asked, most_reasoning)

    def identify(self, request: ChatRequest) -> Identity:
        return Identity.of_chat(request.model)

    def message(self, request: ChatRequest, prompt: Prompt, frontend: Frontend) -> AnswerMessage | None:
        """The message that the answer's text is parsed into, if tools are offered or the model reasons; else None."""
        template, tools = frontend.tokenizer.response_template, request.conversation.tools
        with_calls = tools is not None and tools.choice != "none"
        if template is None or prompt.is_content or not (with_calls or template.field(REASONING)):
            return None
        types = {one.name: one.parameters.get("properties", {}) for one in tools.functions} if tools else {}
        types = {name: properties for name, properties in types.items() if isinstance(properties, dict)}
        return AnswerMessage(
            ResponseParser(template, prompt.begun, types, with_calls),
            shows_reasoning=request.shows_reasoning,
            is_single=with_calls and tools is not None and tools.is_single,
            id_length=frontend.tokenizer.chat_template.call_id_length,
            stop_tokens=frozenset(request.sampling.stop_token_ids) - frontend.model.end_tokens,
        )

    def chunks(
        self, identity: Identity, include_usage: bool, index: int, message: AnswerMessage | None = None
    ) -> StreamEncoder:
        if message is not None:
            return MessageChunks(identity, include_usage, index, message)
        return ChatChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return chat_completion(identity, choices, usage)

    def logprobs(self, tokens: Sequence[ToldToken], spelling: Spelling, top: int) -> dict[str, list[Any]]:
        return chat_logprobs(tokens, spelling, top)
