"""Chat templates: a checkpoint's Jinja template renders messages to prompt text, within bounds of time and memory.

A template comes with a checkpoint and is code: its nested loops could hold the event loop, and with it every tenant,
the watchdog and SIGTERM, for hours. The sandbox of jinja keeps templates from Python's internals and bounds neither
time nor memory. Here each iteration, call and output counts as a step, the clock is read every few steps, and an
operation that could make a huge value out of small ones (repetition, padding, powers, replacement) is checked for its
size first.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial, wraps
from os import urandom
from typing import Any, TypeVar, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from backend.errors import InvalidRequest, ModelLoadError
from backend.text.control_tokens import PLAIN, SEARCHING, ControlTokens, Marking

Message = Mapping[str, Any]
MAX_SOURCE_CHARS = 2**20  # the longest templates in use have some 20,000
CPU_SECONDS = 0.5  # of one rendering: 2,048 messages take 20 ms
MAX_CHARACTERS = 2**24  # of one value, and of all output: four times the characters of the largest body
MAX_ARGUMENT = 10**6  # the largest width, count or indentation as an argument
MAX_BITS = 4096  # of an integer
STEPS_PER_CLOCK_CHECK = 64  # steps between two readings of the clock
CHEAP_LENGTH = 4096  # characters or items that take no time worth counting
_SEQUENCES = (str, bytes, list, tuple)
_OF_DICTS = frozenset(dir(dict))  # attributes, which precede items of these names
T = TypeVar("T")
_WIDTH = re.compile(r"[%{][^%{}]{0,40}\d{7,}")  # in a format, as in "%10000000d"
_SIZED = {
    "batch", "center", "expandtabs", "indent", "lipsum", "ljust", "rjust", "slice", "to_bytes", "tojson", "truncate",
    "wordwrap", "zfill",
}  # fmt: skip
# Mistral's templates refuse ids of another length
_CALL_ID_LENGTH = re.compile(r"\bid\s*\|\s*length\s*!=\s*(\d{1,2})\b")
_CHECKED = _SIZED | {"format", "format_map", "replace", "join"}  # the calls that `_check_call` examines


class ChatTemplate:
    """One compiled template, in the environment that Hugging Face templates are written for.

    It renders as `transformers.apply_chat_template` does. The sandbox is immutable and keeps a template away from
    Python's internals; its time and memory are bounded. Clients never supply a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str = "chat_template",
        control: ControlTokens | None = None,
    ) -> None:
        """`special_tokens` are the names that a template may print: bos_token, eos_token and so on. `control` are the
        tokens that only the template may write into a prompt; None: a request that spells a control token writes it
        too.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._control = control
        try:
            self._template = self._compiled(None)
            self.call_id_length = int(found[1]) if (found := _CALL_ID_LENGTH.search(source)) else None
            self.variables = frozenset(find_undeclared_variables(self._template.environment.parse(source)))
            marked = control and self._compiled(control)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as exc:
            raise ModelLoadError(
                f"{origin}: the chat template does not compile: {_reason(exc)}; correct or remove it"
            ) from exc
        self._try_out(origin)
        self._is_marked = False
        if control and marked and self._keeps_marks(marked, control):
            self._template, self._is_marked = marked, True

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt text, special tokens included. Encode it with `add_special_tokens=False` and as a whole: it
        may be a `PartedText`. No text in it holds a lone surrogate.

        `continue_final_message`: the prompt ends where the last message does, so that the answer continues that
        message. `variables` are further variables for the template, such as `tools`; `self.variables` names the ones
        that it reads.

        Raises `InvalidRequest` on `messages` when the template refuses them (for instance an order of roles), fails, or
        takes more time or memory than it may.
        """
        written, control = partial(self._written, add_generation_prompt, continue_final_message), self._control
        try:
            text = written(messages, variables)
            if control is None:
                return text
            if self._is_marked:
                return control.prompt(text)
            neutral = written(*control.neutral((messages, variables))) if control.count(text) else text
            if control.count(text) != control.count(neutral):
                raise TemplateError("a text in them spells a control token of the model: leave it out")
            return text
        except Exception as exc:  # a template is a program: it can raise any of Python's exceptions
            reason = control.plain(_reason(exc)) if control else _reason(exc)
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", "messages") from exc

    def _compiled(self, control: ControlTokens | None) -> Template:
        special_tokens = self._special_tokens
        if control is not None:
            special_tokens = {name: control.marked(text) for name, text in special_tokens.items()}
        template = _environment(control).from_string(_bounded(self.source))
        template.globals = {**template.globals, **special_tokens}  # no chain of maps, which each rendering would copy
        return template

    def _try_out(self, origin: str) -> None:
        """Refuse a template that overruns on a greeting. Its other errors may be its own rules about messages."""
        try:
            self._rendered(self._template, _GREETING, True, {})
        except TemplateOverrun as exc:
            raise ModelLoadError(f"{origin}: the chat template cannot be served: {exc}; correct or remove it") from exc
        except Exception:  # noqa: BLE001, S110 - a template is code of its own, and may want other messages
            pass

    def _keeps_marks(self, marked: Template, control: ControlTokens) -> bool:
        """Return True if the template writes each of its control tokens recognisably, apart from those of requests."""
        for messages in (_GREETING, _CONVERSATION):
            try:
                text = self._rendered(self._template, messages, True, {"tools": _TOOLS})
            except Exception:  # noqa: BLE001, S112 - what it refuses here it may refuse
                continue
            try:
                prompt = control.prompt(self._rendered(marked, messages, True, {"tools": _TOOLS}))
            except Exception:  # noqa: BLE001 - of the marks then
                return False
            if type(prompt) is not str or control.count(prompt) != control.count(text):
                return False
        return True

    def _written(
        self,
        add_generation_prompt: bool,
        continue_final_message: bool,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
    ) -> str:
        if not continue_final_message:
            return self._rendered(self._template, messages, add_generation_prompt, variables)
        mark = f"\u241f{urandom(8).hex()}\u241f"  # a text that no client can have sent
        last = {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}
        text, found, _ = self._rendered(self._template, [*messages[:-1], last], False, variables).rpartition(mark)
        if not found:
            raise TemplateError("it leaves out the end of the last message, which can therefore not be continued")
        return text

    def _rendered(
        self, template: Template, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        context = {
            "tools": None,
            "documents": None,
            **variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        return cast(GuardedEnvironment, template.environment).guard.rendering(partial(template.render, context))


_GREETING: list[Message] = [{"role": "user", "content": "Hi"}]
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_CONVERSATION: list[Message] = [
    {"role": "system", "content": "Hi"},
    *_GREETING,
    {"role": "assistant", "content": "Hi", "reasoning_content": "Hi"},
    *_GREETING,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "Hi"},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "Hi", "parameters": {"type": "object"}}}]


def _reason(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def _bounded(source: str) -> str:
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"it has {len(source):,} characters, at most {MAX_SOURCE_CHARS:,} are read")
    return source


def _environment(control: ControlTokens | None) -> "GuardedEnvironment":
    extensions = [_GenerationBlock, loopcontrols]
    environment = GuardedEnvironment(control, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.add_filter("tojson", _to_json)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _new_dict,
        "namespace": _GuardedNamespace,
    }
    return environment


class _GenerationBlock(Extension):
    """Renders `{% generation %}...{% endgeneration %}`, which marks assistant text for training, as its body."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """Refuses names with an underscore, through which a namespace would reach its class (jinja2 advisory, transformers
    5).
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not store {name!r} on a namespace")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Render plain JSON: jinja's own filter escapes HTML. Options as in transformers: indent, separators, sort_keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class TemplateOverrun(SecurityError):
    """The template takes more time or memory than any conversation needs."""


class RenderingUse(threading.local):
    """The steps, characters and time that the rendering on this thread has used. During compilation only sizes are
    bounded.
    """

    deadline = float("inf")  # in seconds of thread time, so that load on the machine costs a rendering nothing
    steps = 0
    characters = 0

    def rendering(self, render: Callable[[], str]) -> str:
        """Run one rendering with an allowance of its own."""
        self.deadline, self.steps, self.characters = time.thread_time() + CPU_SECONDS, 0, 0
        try:
            return render()
        finally:
            self.deadline = float("inf")

    def step(self) -> None:
        """Count a step. Raises `TemplateOverrun` when the time is used up."""
        self.steps += 1
        if not self.steps % STEPS_PER_CLOCK_CHECK and time.thread_time() > self.deadline:
            raise TemplateOverrun(f"it takes more than {CPU_SECONDS:g} s of CPU")

    def loop(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield the same items, and count each as a step."""
        for item in iterable:
            self.step()
            yield item

    def emit(self, value: Any) -> Any:
        """Return the same value, and count its text as output."""
        if isinstance(value, str):
            self.characters += len(value)
            if self.characters > MAX_CHARACTERS:
                _check_size(self.characters)
        return value

    def concatenated(self, *values: Any) -> str:
        """Return the concatenated texts of the values."""
        texts = list(map(str, values))
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def grown(self, value: T) -> T:
        """Return the same value after a check of its size; it may be longer than the values it was made of."""
        if isinstance(value, _SEQUENCES) and len(value) > CHEAP_LENGTH:
            self.step()
            _check_size(len(value))
        return value


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """An immutable sandbox whose templates are guarded; `guard` counts their use on this thread."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, control: ControlTokens | None = None, **options: Any) -> None:
        """Have templates mark the `control` tokens that they write."""
        super().__init__(**options)
        self.guard = RenderingUse()
        self._control = control
        self.filters = {name: self._bounded(name, filter_) for name, filter_ in self.filters.items()}
        ours = (("loop", self.guard.loop), ("emit", self.guard.emit), ("concatenated", self.guard.concatenated))
        self.filters |= {f"guard.{name}": function for name, function in ours} | {PLAIN: self._plain}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded(name, function)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        if self._control is not None:
            source = Marking(self._control).visit(source)
        return super()._generate(_Guarding().visit(source), *args, **options)

    def _plain(self, value: Any) -> Any:
        return self._control.plain(value) if self._control and isinstance(value, str) else value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a field of a message at once: to find first that a `dict` has no such attribute takes five times
        as long.
        """
        if type(obj) is not dict or attribute in _OF_DICTS:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count and check each call of a macro, function or method by a template. A macro is the template's own: what
        it calls is checked.
        """
        self.guard.step()
        if type(obj) is Macro:
            for of_jinja in ("_loop_vars", "_block_vars"):
                kwargs.pop(of_jinja, None)
            return self.guard.grown(obj(context.eval_ctx, *args, **kwargs))
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            _check_call(method.__name__, owner, *args, *kwargs.values())
        if self._control and isinstance(owner, str) and method.__name__ in SEARCHING and self._control.has_twins(owner):
            options = {name: one for name, one in kwargs.items() if not name.startswith("_")}  # the others are jinja's
            return self.guard.grown(self._control.searched(owner, method.__name__, *args, **options))
        return self.guard.grown(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return self.guard.grown(left + right)
        self.guard.step()
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = int(hasattr(function, "jinja_pass_arg"))  # a context or an environment precedes the filtered value
        is_checked = name in _CHECKED

        @wraps(function)  # which keeps jinja's marks for the arguments to pass
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.guard.step()
            if is_checked:
                _check_call(name, *args[passed:], *kwargs.values())
            return self.guard.grown(function(*args, **kwargs))

        return bounded


class _Guarding(NodeTransformer):
    """Wraps loops, outputs and concatenations in the guard's filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "loop")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_emitted(one) for one in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        first, *others = node.nodes
        return _filtered(first, "concatenated", others)


def _emitted(node: nodes.Expr) -> nodes.Expr:
    """Return the node unguarded: the text of the template itself is no larger than its source."""
    return node if isinstance(node, nodes.TemplateData) else _filtered(node, "emit")


def _filtered(node: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, f"guard.{name}", args or [], [], None, None, lineno=node.lineno)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateOverrun(f"it makes more than {MAX_CHARACTERS:,} characters or items")


def _check_call(name: str, value: Any, *args: Any) -> None:
    """Refuse a filter or method call that would pad, repeat, format or replace to a value of excessive size."""
    if name in _SIZED and any(isinstance(arg, int) and arg > MAX_ARGUMENT for arg in args):
        raise TemplateOverrun(f"it asks {name} for more than {MAX_ARGUMENT:,} of something")
    if name in {"format", "format_map"} and isinstance(value, str):
        _check_format(value)
    if name == "replace" and len(args) > 1 and all(isinstance(text, str) for text in (value, *args[:2])):
        _check_size(value.count(args[0]) * len(args[1]))
    if name == "join" and args:
        # the order of Python's method, then of jinja's filter
        for separator, joined in ((value, args[0]), (args[0], value)):
            if isinstance(separator, str) and isinstance(joined, (list, tuple)):
                texts = sum(len(item) for item in joined if isinstance(item, str))
                _check_size(texts + len(separator) * len(joined))


def _check_format(text: str) -> None:
    if _WIDTH.search(text):
        raise TemplateOverrun("it formats to a width of more than six digits")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, _SEQUENCES) and isinstance(times, int):
                _check_size(len(sequence) * times)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator != "%" and bits > MAX_BITS:
            raise TemplateOverrun(f"it computes an integer of more than {MAX_BITS:,} bits")
