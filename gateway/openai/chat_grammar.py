"""The grammar of an answer to a chat: of its calls, and of its content and reasoning beside them."""

from typing import Any

from backend.grammar import Grammar, GrammarKind
from backend.text.response_templates.call_grammar import (
    Tool,
    UnsupportedCalls,
    UnsupportedReasoning,
    call_grammar,
    content_grammar,
    reasoning_grammar,
)
from backend.text.response_templates.lark import Vocabulary
from backend.text.response_templates.parser import ResponseParser
from backend.text.response_templates.tag_grammar import UnsupportedSchema
from backend.text.response_templates.template import REASONING, ResponseTemplate
from backend.text.tokenizer import Tokenizer
from gateway.errors import BadRequest
from gateway.grammar_errors import InvalidGrammar
from gateway.openai.json_schema import enforce
from gateway.openai.requests import ChatRequest
from gateway.openai.tools import Function

_ANY_OBJECT = {"type": "object"}


def chat_grammar(request: ChatRequest, tokenizer: Tokenizer, end_tokens: frozenset[int], begun: str) -> Grammar:
    """The grammar of an answer: the request's calls or its content, after any reasoning.

    `begun` is the part of the answer that the prompt already holds. Raises `BadRequest`, as `InvalidGrammar` about one
    schema.
    """
    template, tools = tokenizer.response_template, request.conversation.tools
    if template is None:
        if not calls_are_constrained(request):
            raise _cannot_think("this model's answers have no reasoning")
        raise BadRequest(
            "tool_choice and strict functions cannot be enforced with this model: it has no response template, and its "
            'chat template writes no calls in a known format. Leave strict out and send "auto".',
            "tools",
        )
    vocabulary, is_reasoning = _vocabulary(tokenizer, end_tokens), ResponseParser(template, begun).is_reasoning
    reasoning: Any = {"is_reasoning": is_reasoning, "most_reasoning": request.thinking_budget}
    content = request.sampling.grammar
    if content is not None and not content.is_schema and (tools is not None or request.thinking_budget is not None):
        raise BadRequest(
            f"{request.grammar_field} cannot be combined with tools or a thinking_token_budget, unless it is a JSON "
            "schema: leave either out.",
            request.grammar_field,
        )
    if request.thinking_budget is not None and template.field(REASONING) is None:
        raise _cannot_think("this model's answers have no reasoning")
    try:
        if tools is not None and calls_are_constrained(request):
            source = call_grammar(
                template,
                [_tool(function, request.left_out) for function in tools.functions],
                vocabulary,
                is_required=tools.choice == "required",
                is_single=tools.is_single,
                content=content,
                **reasoning,
            )
        elif content is not None:
            source = content_grammar(template, vocabulary, content, **reasoning)
        else:
            source = reasoning_grammar(template, vocabulary, **reasoning)
    except UnsupportedReasoning as error:
        raise _cannot_think(str(error)) from None
    except (UnsupportedCalls, UnsupportedSchema) as error:
        raise BadRequest(
            f'tool_choice and strict functions cannot be enforced here: {error}. Leave strict out and send "auto".',
            "tools",
        ) from None
    return Grammar(GrammarKind.LARK, source)


def calls_are_constrained(request: ChatRequest) -> bool:
    """True if a grammar enforces the calls: a call is required, a function is strict, or calls may replace constrained
    content.
    """
    tools = request.conversation.tools
    if tools is None or tools.choice == "none":
        return False
    return tools.is_constrained or request.sampling.grammar is not None


def needs_grammar(request: ChatRequest, template: ResponseTemplate | None) -> bool:
    """True if the answer needs a grammar beyond the client's own for its content: calls may replace it, or reasoning
    may precede it.
    """
    if calls_are_constrained(request) or request.thinking_budget is not None:
        return True
    grammar = request.sampling.grammar
    return grammar is not None and grammar.kind is not GrammarKind.LARK and reasons(template)


def reasons(template: ResponseTemplate | None) -> bool:
    """True if answers may begin with reasoning."""
    return template is not None and template.field(REASONING) is not None


def _cannot_think(reason: str) -> BadRequest:
    return BadRequest(
        "thinking_token_budget, or max_reasoning_tokens of the request's class, cannot be enforced here: "
        f"{reason}. Leave it out, or ask for another service_tier.",
        "thinking_token_budget",
    )


def _vocabulary(tokenizer: Tokenizer, end_tokens: frozenset[int]) -> Vocabulary:
    ends = frozenset(text for text, token_id in tokenizer.added_tokens.items() if token_id in end_tokens)
    special = {
        text: token_id
        for text, token_id in tokenizer.added_tokens.items()
        # llguidance takes tokens in angle brackets for special, also against the tokenizer
        if text not in ends and (text in tokenizer.special_tokens or (text.startswith("<") and text.endswith(">")))
    }
    return Vocabulary(special, ends, tuple(sorted(end_tokens)))


def _tool(function: Function, left_out: list[str]) -> Tool:
    """A function with the enforced part of its schema: all of it if it is strict. The places of the rest are appended
    to `left_out`. Raises `InvalidGrammar`.
    """
    try:
        left_out += enforce(function.parameters, function.param, function.is_strict)
    except InvalidGrammar:
        if function.is_strict:
            raise
        left_out.append(function.param)
        return Tool(function.name, _ANY_OBJECT, is_strict=False)
    return Tool(function.name, function.parameters, function.is_strict)
