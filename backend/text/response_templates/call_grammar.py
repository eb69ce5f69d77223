"""The grammar of an answer with calls, derived from the template that parses the answer, so that both always agree.

A call is the template's delimiters and its transform around a JSON document of the arguments' schema. For a delimiter
that is a regular expression, the grammar has its simplest match. Text before the opening of a call is free unless calls
are required; a block of reasoning always is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.grammar import Grammar, GrammarKind
from backend.text.response_templates.calls import object_keys, takes_plain_json
from backend.text.response_templates.lark import SPACE, TEXT, Lark, Vocabulary, literal_start, ways_to_begin
from backend.text.response_templates.pattern import Pattern
from backend.text.response_templates.pattern_syntax import Character, CharClass, Concat, LookAhead, Node, Repeat, Start
from backend.text.response_templates.tag_grammar import tag_arguments
from backend.text.response_templates.template import (
    CALLS,
    CONTENT,
    REASONING,
    CallShape,
    ResponseField,
    ResponseTemplate,
)


class UnsupportedCalls(ValueError):
    """No grammar can be derived for calls in the template's format. The message says why."""


class UnsupportedReasoning(ValueError):
    """The tokens of the model's reasoning cannot be bounded. The message says why."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called: its name, and the schema of its arguments. If it is not strict, the grammar may
    enforce less of the schema, where the format of calls cannot express more.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = True


def call_grammar(
    template: ResponseTemplate,
    tools: Sequence[Tool],
    vocabulary: Vocabulary,
    *,
    is_required: bool,
    is_single: bool,
    is_reasoning: bool,
    content: Grammar | None = None,
    most_reasoning: int | None = None,
) -> str:
    """Return the grammar of an answer that may call these tools, or must; at most one call if `is_single`.
    `is_reasoning`: the prompt has opened a block of reasoning. `content` is the grammar of an answer without calls.
    `most_reasoning` bounds the tokens of a block of reasoning.

    Raises `UnsupportedCalls`, `UnsupportedSchema` about one tool, and `UnsupportedReasoning`.
    """
    field = template.field(CALLS)
    if field is None or field.open is None:
        raise UnsupportedCalls("the model's response template has no field tool_calls")
    writer = _Writer(template, field, Lark(vocabulary), is_single, most_reasoning)
    reasoning, at_start = writer.reasoning(is_reasoning), not is_reasoning
    if is_required:
        body = writer.required(tools, at_start)
    elif content is not None:
        body = f"{writer.required(tools, at_start)} | {writer.content(content, at_start)}"
    else:
        body = writer.optional(tools, at_start)
    return f"start: {reasoning} {writer.lark.rule('body', body)}\n{writer.lark}"


def content_grammar(
    template: ResponseTemplate,
    vocabulary: Vocabulary,
    content: Grammar,
    *,
    is_reasoning: bool,
    most_reasoning: int | None = None,
) -> str:
    """Return the grammar of an answer whose content matches this grammar, after an optional block of reasoning, as for
    `call_grammar`.
    """
    writer = _Writer(template, None, Lark(vocabulary), True, most_reasoning)
    return f"start: {writer.reasoning(is_reasoning)} {writer.content(content, not is_reasoning)}\n{writer.lark}"


def reasoning_grammar(
    template: ResponseTemplate, vocabulary: Vocabulary, *, is_reasoning: bool, most_reasoning: int
) -> str:
    """Return the grammar of any answer whose first block of reasoning has at most `most_reasoning` tokens.

    Raises `UnsupportedReasoning` unless single tokens open and end the block.
    """
    writer = _Writer(template, None, Lark(vocabulary), True, most_reasoning)
    field = template.field(REASONING)
    opening = next(ways_to_begin(field.open.node), ()) if field is not None and field.open is not None else ()
    opens = writer.lark.token(literal_start(opening))
    if opens is None:
        raise UnsupportedReasoning("no token of its own opens the model's reasoning")
    ends = ",".join(map(str, vocabulary.end_ids))
    anything = writer.lark.rule("anything", f"<[^{ends}]>*" if ends else "<[*]>*")
    reasoned = f"{writer.reasoning(True)} {anything}"
    if is_reasoning:
        return f"start: {reasoned}\n{writer.lark}"
    other = f"<[^{','.join(filter(None, [ends, str(opens)]))}]> {anything}"
    return f"start: (<[{opens}]> {reasoned} | {other})?\n{writer.lark}"


@dataclass(frozen=True, slots=True)
class _Writer:
    template: ResponseTemplate
    field: ResponseField | None  # the field of calls
    lark: Lark
    is_single: bool
    most_reasoning: int | None  # tokens

    @property
    def calls(self) -> ResponseField:
        assert self.field is not None, "there are tools to call"
        return self.field

    def reasoning(self, is_open: bool) -> str:
        """Return the rule of a block of reasoning at the beginning: required if the prompt has opened it, else
        optional.
        """
        field = self.template.field(REASONING)
        closing = next(filter(None, self._endings(field)), None) if field else None
        if field is None or field.open is None or closing is None:
            return ""
        if self.most_reasoning is None:
            block: str | None = self.lark.until(closing)
        else:
            block = self.lark.until_token(closing, self.most_reasoning)
            if block is None:
                raise UnsupportedReasoning("no token of its own ends the model's reasoning")
        after = f"{block} {self._between()}"
        if is_open:
            return after
        opening = self.lark.node(field.open.node, {}, at_start=True)
        return f"({opening} {after})?" if opening else ""

    def content(self, grammar: Grammar, at_start: bool) -> str:
        """Return the rule of content that matches a grammar of any kind but Lark's."""
        field, source = self.template.field(CONTENT), grammar.source
        opening = self.lark.node(field.open.node, {}, at_start) if field and field.open else ""
        match grammar.kind:
            case GrammarKind.CHOICE:
                written = self.lark.choice(json.loads(source))
            case GrammarKind.REGEX:
                written = self.lark.regex(source)
            case _:
                schema = json.loads(source)
                written = self.lark.json(schema if isinstance(schema, dict) else {"allOf": [schema]})
        return f"{opening or ''} {written}"

    def required(self, tools: Sequence[Tool], at_start: bool) -> str:
        """Return the rule of one call, and of further calls where they may follow."""
        first = self._calls(tools, [self._open.node], at_start)
        if not self._repeats:
            return first
        more = self._calls(tools, [self._open.node], False) if at_start else first
        return f"{first} ({SPACE} {more})*"

    def optional(self, tools: Sequence[Tool], at_start: bool) -> str:
        """Return the rule of free text with calls in it."""
        if self.template.implicit is None:
            return self._regions(tools, at_start)
        free, options = TEXT, []
        for way in map(_without_space, ways_to_begin(self._open.node)):
            if at_start and way and isinstance(way[0], Start):
                options.append(self._calls(tools, way, True))
                free = self._not_beginning_with(way[-1])
        segments = []
        for way in map(_without_space, ways_to_begin(self._open.node)):
            trigger = literal_start(way)
            if trigger:
                segments.append(f"{self.lark.until(trigger, free)} {self._calls(tools, way[len(trigger) :], False)}")
        if not segments and not options:
            raise UnsupportedCalls("the model's response template does not say how a call begins")
        if segments and self._repeats:
            return " | ".join([*options, f"({' | '.join(segments)})* {free}?"])
        return " | ".join([*options, *segments, f"{free}?"])

    def _regions(self, tools: Sequence[Tool], at_start: bool) -> str:
        """Return the rule of regions of text, the last of which may be a region of calls."""
        whole, last = [], []
        for field in self.template.fields:
            opening = self.lark.node(field.open.node, {}, at_start) if field.open and field.name not in CALLS else None
            if opening:
                last.append(f"{opening} {TEXT}?")
                if (closing := next(filter(None, self._endings(field)), None)) is not None:
                    whole.append(f"{opening} {self.lark.until(closing)} {self._between()}")
        calls = self._calls(tools, [self._open.node], at_start)
        return f"({' | '.join(whole)})* ({' | '.join([*last, calls])})?"

    def _calls(self, tools: Sequence[Tool], opening: Sequence[Node], at_start: bool) -> str:
        """Return the rule of a region of calls, from this part of its opening delimiter on."""
        if self.calls.is_each:
            header = self._written(opening, {}, at_start)
            call = self.lark.rule("call", " | ".join([self._object(tool) for tool in tools]))
            more = "" if self.is_single else f'(", " {call})*'
            return self.lark.rule("calls", f'{header} {SPACE} "[" {call} {more} "]" {self._close()}')
        written = []
        for tool in tools:
            header = self._written(opening, {self._shape.name[0]: tool.name}, at_start)
            written.append(f"{header} {self._body(tool)} {self._close()}")
        return self.lark.rule("calls", " | ".join(written))

    def _body(self, tool: Tool) -> str:
        has_name = len(self._shape.name) == 1 and self._shape.arguments == ("content",)
        if has_name and takes_plain_json(self.calls):
            return f"{SPACE} {self.lark.json(tool.parameters)} {self._before_close()}"
        if has_name and self.calls.content == "xml-inline" and not self.calls.args.get("merge_duplicates"):
            return f"{SPACE} {tag_arguments(self.lark, self.calls, tool.parameters, tool.is_strict)}"
        return f"{SPACE} {self._object(tool)} {self._before_close()}"

    def _object(self, tool: Tool) -> str:
        keys = object_keys(self.calls) if takes_plain_json(self.calls) else None
        if keys is None:
            raise UnsupportedCalls("the model writes calls in a format of its own, which is not JSON")
        name_key, arguments_key = map(json.dumps, keys)
        before = f"{{{name_key}: {json.dumps(tool.name)}, {arguments_key}: "
        return f'{self.lark.text(before)} {self.lark.json(tool.parameters)} "}}"'

    def _written(self, nodes: Sequence[Node], groups: Mapping[str, str], at_start: bool) -> str:
        written = self.lark.node(Concat(tuple(nodes)), groups, at_start)
        if written is None:
            raise UnsupportedCalls("the model's response template has calls only where the answer begins")
        return written

    def _close(self) -> str:
        """Return the rule of a region's end: empty if the end of the answer ends it."""
        if self.calls.close is None or None in self._endings(self.calls):
            return ""
        return self.lark.node(self.calls.close.node, {}) or ""

    def _before_close(self) -> str:
        return SPACE if self._close() else ""

    def _between(self) -> str:
        """Return the rule of the text between two regions: space, or the beginning of a new message."""
        if self.template.implicit is not None:
            return SPACE
        anchors = self.template.anchor_literals
        return f"({self.lark.text(anchors[0])})?" if anchors else ""

    def _endings(self, field: ResponseField) -> list[str | None]:
        """Return the texts that close a field: "" for an empty text, and None for a token that ends the answer."""
        if field.close is None:
            return [None]
        texts = [
            "".join([one.char for one in way if isinstance(one, Character)]) for way in ways_to_begin(field.close.node)
        ]
        return [None if self.lark.is_end(text) else text for text in texts]

    def _not_beginning_with(self, ahead: Node) -> str:
        """Return the rule of free text that does not begin with a call."""
        first = next(iter(literal_start(next(ways_to_begin(ahead.part)))), "") if isinstance(ahead, LookAhead) else ""
        if not first:
            raise UnsupportedCalls("the model's response template does not say with which character a call begins")
        self.lark.rules.append(f"FREE: /[^ \\n{first if first.isalnum() else chr(92) + first}](.|\\n)*/")
        return "FREE"

    @property
    def _open(self) -> Pattern:
        assert self.calls.open is not None
        return self.calls.open

    @property
    def _shape(self) -> CallShape:
        assert self.calls.shape is not None
        return self.calls.shape

    @property
    def _repeats(self) -> bool:
        """True if several regions of calls may follow one another."""
        if self.is_single or self.calls.is_each or self.template.implicit is None:
            return False
        endings = self._endings(self.calls)
        return None not in endings or "" in endings  # "": the next region begins where this one ends


def _without_space(way: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return a sequence without the optional space at its beginning."""
    match way:
        case (Repeat(CharClass("\\s"), 0), *rest):
            return tuple(rest)
    return way
