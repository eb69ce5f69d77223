"""A checkpoint's own Jinja template turns messages into prompt text."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from backend.errors import InvalidRequest, ModelLoadError
from backend.json_file import JsonFile
from backend.text.template_guard import GuardedEnvironment, TemplateOverrun

Message = Mapping[str, str | None]
MAX_SOURCE = 2**20  # characters; the longest templates in use have some 20,000


class ChatTemplate:
    """One compiled template in the environment that Hugging Face templates are written for.

    It renders what `transformers.apply_chat_template` renders. The sandbox is immutable and keeps a template away from
    Python's internals; its time and memory are bounded (`backend/text/template_guard.py`). Clients never supply one.

    A message that holds the text of a special token ("<|eot_id|>") reaches the tokenizer as it is, the default also of
    transformers and vLLM. It confuses only its own conversation; applications that embed foreign text remove it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str = "chat_template") -> None:
        """`special_tokens` are the names a template may print: bos_token, eos_token and so on."""
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(_bounded(source))
            self._template.globals = dict(self._template.globals)  # a chain of maps, copied for each rendering
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as exc:
            raise ModelLoadError(
                f"{origin}: the chat template does not compile: {_reason(exc)}; correct or remove it"
            ) from exc
        self._try_out(origin)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt text, special tokens included: encode it with `add_special_tokens=False`.

        Raises `InvalidRequest` on `messages` when the template refuses them (say, an order of roles), fails, or takes
        more time or memory than `backend.text.template_guard` allows.
        """
        try:
            return self._rendered(messages, add_generation_prompt, **variables)
        except Exception as exc:  # a template is code of its own: it can raise whatever Python can
            raise InvalidRequest(f"the chat template refuses these messages: {_reason(exc)}", "messages") from exc

    def _try_out(self, origin: str) -> None:
        """Refuse a template that fails on a greeting. Whatever else it says against one may be its rule."""
        try:
            self._rendered([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        except TemplateOverrun as exc:
            raise ModelLoadError(f"{origin}: the chat template cannot be served: {exc}; correct or remove it") from exc
        except Exception:  # noqa: BLE001, S110 - a template is code of its own, and may want other messages
            pass

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool, **variables: Any) -> str:
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        context |= {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        return self._environment.guard.rendering(lambda: self._template.render(context))


def read_chat_template(model_dir: Path, tokenizer_config: JsonFile) -> tuple[str, str] | None:
    """Return the template's source and the name of the file it stands in, or None.

    As in transformers, chat_template.jinja wins over tokenizer_config.json; among named templates, "default" is taken.
    """
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return _read_text(path), str(path)
    origin = str(tokenizer_config.path)
    match tokenizer_config.get("chat_template"):
        case None:
            return None
        case str(source):
            return source, origin
        case [*entries] if (default := _default_template(entries)) is not None:
            return default, origin
    raise tokenizer_config.wrong(
        "chat_template", 'a string, or a list of templates with one named "default", is expected'
    )


def _default_template(entries: list[Any]) -> str | None:
    for entry in entries:
        match entry:
            case {"name": "default", "template": str(source)}:
                return source
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelLoadError(f"{path}: not readable as UTF-8 text: {exc}") from exc


def _reason(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def _bounded(source: str) -> str:
    if len(source) > MAX_SOURCE:
        raise ValueError(f"it has {len(source):,} characters, at most {MAX_SOURCE:,} are read")
    return source


def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
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
    """Refuses underscored names, by which a namespace would reach its class (jinja2 advisory, transformers 5)."""

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
