"""A conversation as the request holds it, with all inputs of its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backend.errors import InvalidRequest
from backend.text.chat_template import ChatTemplate, TemplateOverrun
from backend.text.tokenizer import Tokenizer
from gateway.errors import BadRequest
from gateway.openai.earlier_calls import forms_of
from gateway.openai.foreign_fields import Ignored
from gateway.openai.messages import Message, message_size, template_messages
from gateway.openai.template_variables import known_variables, read_variables
from gateway.openai.tools import ToolUse, read_tools

MESSAGE_BYTES = 128  # of text that take as long to render as an empty message


@dataclass(slots=True)  # one is made for each request; frozen, making it takes three times as long
class Conversation:
    """The messages, and the template's other variables. Treat it as immutable."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: ToolUse | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    ignored: Ignored | None = field(default=None, compare=False)  # of the variables, once rendered; None: none may be
    prompt_field: str | None = None  # the field that became the messages; None: they are the request's own
    effort_field: str = "reasoning_effort"  # the field of the reasoning effort

    @property
    def size(self) -> int:
        """The cost of rendering it, in bytes of text."""
        documents = sum([len(text) for one in self.variables.get("documents", ()) for text in one.values()])
        messages = MESSAGE_BYTES * len(self.messages) + sum(map(message_size, self.messages))
        return messages + documents + (self.tools.size if self.tools else 0)

    def shortened(self, num_chars: int) -> "Conversation | None":
        """The conversation with `num_chars` of each longer text of a user; None if there is no longer one."""
        if all(len(text) <= num_chars for text in map(_said_by_user, self.messages)):
            return None
        messages = (
            {**message, "content": text[:num_chars]} if len(text := _said_by_user(message)) > num_chars else message
            for message in self.messages
        )
        return replace(self, messages=tuple(messages))

    def render(self, tokenizer: Tokenizer) -> str:
        """The prompt; variables that its template does not read are noted as ignored.

        Raises `BadRequest` for a feature that the template lacks, by name, and `InvalidRequest`.
        """
        variables: dict[str, Any] = {}
        if self.variables or self.tools or any(len(message) > 2 for message in self.messages):
            template = tokenizer.chat_template
            self._check(template)
            variables = known_variables(self.variables, template, self.ignored, self.effort_field)
            if self.tools is not None:
                variables["tools"] = list(self.tools.definitions)
        variables |= {"continue_final_message": True} if self.continue_final_message else {}
        refusal: InvalidRequest | None = None
        for messages in forms_of(self.messages, tokenizer):
            try:
                return tokenizer.render_chat(messages, self.add_generation_prompt, **variables)
            except InvalidRequest as error:
                refusal = refusal or error
                if isinstance(error.__cause__, TemplateOverrun):
                    break
        assert refusal is not None, "there is one form at least"
        refusal.param = self.prompt_field or refusal.param
        raise refusal

    def _check(self, template: ChatTemplate) -> None:
        """Raise `BadRequest` for tools, or calls of tools, that the template would drop."""
        if self.tools is not None and "tools" not in template.variables:
            raise _unsupported("tools", "tools")
        if "tool_calls" in template.source:
            return
        for index, message in enumerate(self.messages):
            if "tool_calls" in message:
                raise _unsupported(self.prompt_field or f"messages[{index}].tool_calls", "calls of tools")


def _said_by_user(message: Message) -> str:
    content = message["content"] if message["role"] == "user" else ""
    return content if isinstance(content, str) else ""


def _unsupported(param: str, what: str) -> BadRequest:
    return BadRequest(
        f"{param} cannot be told to this model: its chat template has no place for {what}. Leave them out, or ask a "
        "model that was trained to call tools.",
        param,
    )


def read_conversation(body: Mapping[str, Any], ignored: Ignored | None = None) -> Conversation:
    """Returns the conversation of a chat's body. Raises `BadRequest`."""
    goes_on, prompts = body.get("continue_final_message") or False, body.get("add_generation_prompt")
    if goes_on and prompts:
        raise BadRequest(
            "continue_final_message cannot be combined with add_generation_prompt: set the latter to false.",
            "continue_final_message",
        )
    messages = template_messages(body["messages"])
    if goes_on and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
        raise BadRequest(
            "continue_final_message needs a last message of the role assistant, with content to go on with.",
            "continue_final_message",
        )
    return Conversation(
        messages,
        add_generation_prompt=not goes_on and (True if prompts is None else prompts),
        continue_final_message=goes_on,
        tools=read_tools(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls")),
        variables=read_variables(body.get("chat_template_kwargs"), body.get("documents"), body.get("reasoning_effort")),
        ignored=ignored,
    )
