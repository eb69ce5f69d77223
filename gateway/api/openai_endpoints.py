"""The endpoints of the OpenAI API that generate text; each reads its bodies and writes its answers in its own way."""

import asyncio

from gateway.api.generation import GenerationEndpoint
from gateway.api.generation_request import Prompt
from gateway.http.json_body import JsonBody
from gateway.openai.replies import (
    ChatChunks,
    Choice,
    Chunks,
    CompletionChunks,
    Identity,
    TokenUsage,
    chat_completion,
    text_completion,
)
from gateway.openai.requests import ChatRequest, CompletionRequest, parse_chat_request, parse_completion_request

PROMPT_TAIL = 8  # the last ids of a prompt, with which a completion may share a character


class ChatEndpoint(GenerationEndpoint):
    """Answers POST /v1/chat/completions with an assistant's message."""

    operation = "chat"
    prompt_param = "messages"

    def parse(self, body: JsonBody) -> ChatRequest:
        return parse_chat_request(body, self.service.limits)

    async def prompts(self, request: ChatRequest, tenant: str) -> list[Prompt]:
        text = await self.service.render(tenant, request.messages, request.add_generation_prompt)
        return [Prompt(await self.encode(tenant, text, request.add_special_tokens), ())]

    def identify(self, model: str) -> Identity:
        return Identity.of_chat(model)

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        return ChatChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return chat_completion(identity, choices, usage)


class CompletionEndpoint(GenerationEndpoint):
    """Answers POST /v1/completions with text."""

    operation = "text_completion"
    prompt_param = "prompt"
    default_max_tokens = 16  # as OpenAI's and vLLM's

    def parse(self, body: JsonBody) -> CompletionRequest:
        return parse_completion_request(body, self.service.limits)

    async def prompts(self, request: CompletionRequest, tenant: str) -> list[Prompt]:
        prompts = []
        for given in request.prompts:
            if isinstance(given, str):
                token_ids = await self.encode(tenant, given, request.add_special_tokens)
            else:
                token_ids = list(given)
            prompts.append(Prompt(token_ids, token_ids[-PROMPT_TAIL:]))
            await asyncio.sleep(0)  # many short prompts do not hold the loop
        return prompts

    def identify(self, model: str) -> Identity:
        return Identity.of_completion(model)

    def chunks(self, identity: Identity, include_usage: bool, index: int) -> Chunks:
        return CompletionChunks(identity, include_usage, index)

    def complete(self, identity: Identity, choices: list[Choice], usage: TokenUsage) -> bytes:
        return text_completion(identity, choices, usage)
