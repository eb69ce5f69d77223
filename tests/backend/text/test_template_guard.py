from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backend.errors import InvalidRequest, ModelLoadError
from backend.text.chat_template import ChatTemplate
from backend.text.template_guard import GuardedEnvironment
from backend.text.tokenizer import Tokenizer
from tests.backend.tiny_tokenizers import write_model


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (raise_exception | attr('__globals__'))['__builtins__'] }}",
        "{{ dict.__init__.__globals__.keys() }}",
        "{% set ns = namespace(__class__=dict) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__class__ = dict %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
        "{{ 1 / 0 }}{{ none + 'x' }}",
    ],
)
def test_a_hostile_template_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        ChatTemplate(template, {}).render(GREETING)


GREETING = [{"role": "user", "content": "Hi"}]
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long sum again and again": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "repetition": "{{ 'a' * 10000000000 }}",
    "a list repeated": "{{ ([0] * 10000000000) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "padding by a filter": "{{ 'a' | center(10000000000) }}",
    "padding by a method": "{{ 'a'.ljust(10000000000) }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a format by a filter": "{{ '%10000000000d' | format(1) }}",
    "a format by a method": "{{ '{:>10000000000}'.format(1) }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "indentation": "{{ {'a': [1]} | tojson(indent=10000000000) }}",
    "batches": "{{ [1] | batch(10000000000, 0) | list }}",
    "replacement": "{% set b = 'a' * 4000000 %}{{ b | replace('a', b) }}",
    "joining": "{% set b = 'a' * 4000000 %}{{ b.join(['x'] * 100000) }}",
    "doubling": "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "output": "{% set b = 'a' * 4000000 %}{% set x %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_takes_all_time_or_memory_is_refused_at_load(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, chat_template=BOMBS[name])
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: the chat template cannot be served: it "):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_a_template_that_bides_its_time_is_refused_when_it_strikes() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}" + BOMBS["nested loops"] + "{% endif %}fine", {})
    assert template.render(GREETING) == "fine"
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"refuses these messages: it takes more than 0\.5 s of CPU"):
            template.render(GREETING * 2)
    assert template.render(GREETING) == "fine"


@pytest.mark.parametrize("name", ["role", "items", "update", "__class__", "get", "_private", "absent", ""])
@pytest.mark.parametrize("value", [{"role": "user", "items": [1], "update": 2, "_private": 3, "": 4}, {}, [1], "text"])
def test_a_field_of_a_message_is_what_the_sandbox_makes_of_it(value: object, name: str) -> None:
    found, expected = (
        environment.getattr(value, name) for environment in (GuardedEnvironment(), ImmutableSandboxedEnvironment())
    )
    assert repr(found) == repr(expected)
