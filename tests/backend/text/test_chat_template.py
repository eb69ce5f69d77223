"""Chat templates render what transformers renders; those that are wrong, hostile or without end are refused."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from backend.errors import InvalidRequest, ModelLoadError
from backend.text.chat_template import ChatTemplate
from backend.text.tokenizer import Tokenizer
from tests.backend import tiny_tokenizers as tiny
from tests.backend.tiny_tokenizers import write_model

LLAMA3 = """{{- bos_token }}{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
QWEN = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}{% endgeneration %}{{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- {'turns': ns.last, 'é': '<&>'} | tojson }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if message['role'] == 'user' %}
{{ ' [INST] ' + message['content'] + ' [/INST]' }}
  {% else %}
{{ ' ' + message['content'] + ' ' + eos_token }}
  {% endif %}
{% endfor %}
{{ tools is none }} {{ strftime_now('%Y') | length }} {{ unknown_name }}
"""
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi <b>there</b> 😀\n"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "  three  "},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
]


@pytest.mark.parametrize("template", [LLAMA3, QWEN, MISTRAL])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_what_transformers_renders(
    template: str, conversation: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    reference = PreTrainedTokenizerFast(tokenizer_object=tiny.byte_level_bpe(), **special)  # type: ignore[no-untyped-call]
    try:
        expected = reference.apply_chat_template(
            conversation, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as exc:  # noqa: BLE001 - a template's own raise_exception
        with pytest.raises(InvalidRequest, match=str(exc).split("/", maxsplit=1)[0]) as refusal:
            ChatTemplate(template, special).render(conversation, add_generation_prompt)
        assert refusal.value.param == "messages"
    else:
        assert ChatTemplate(template, special).render(conversation, add_generation_prompt) == expected


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_model(
        tmp_path, chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    )
    assert Tokenizer.from_dir(tmp_path, model_vocab_size=1024).render_chat(CONVERSATIONS[0]) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_dir(tmp_path, model_vocab_size=1024).render_chat(CONVERSATIONS[0]) == "file"


def test_a_missing_template_names_the_remedy(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_model(tmp_path), model_vocab_size=1024)
    with pytest.raises(InvalidRequest, match=r"/v1/completions, or put a chat_template\.jinja") as refusal:
        tokenizer.render_chat(CONVERSATIONS[0])
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        *((template, "chat_template") for template in (5, [{"name": "other", "template": "x"}], [5])),
        *((text, "the chat template does not compile") for text in ("{% if %}", "{{ messages", "{% nosuchtag %}")),
    ],
)
def test_a_template_that_is_none_is_refused_at_load(tmp_path: Path, template: object, complaint: str) -> None:
    write_model(tmp_path, chat_template=template)
    with pytest.raises(ModelLoadError, match=rf"tokenizer_config\.json: {complaint}"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


@pytest.mark.parametrize(
    "template",
    ["{% if x %}" * 3000 + "{% endif %}" * 3000, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * (2**20 + 1)],
    ids=["blocks", "brackets", "length"],
)
def test_a_template_too_deep_or_too_long_to_compile_is_refused(template: str) -> None:
    with pytest.raises(ModelLoadError, match="the chat template does not compile"):
        ChatTemplate(template, {})


def test_long_conversations_and_numbers_in_them_are_no_bombs() -> None:
    said = '{"id": 123456789012, "share": "%99999999d"} {:>99999999}' + "x" * 2_000_000
    rendered = ChatTemplate(QWEN, {}).render(
        [{"role": "user", "content": said}, {"role": "assistant", "content": "y"}] * 2
    )
    assert rendered.count(said) == 2
    many = [{"role": ("user", "assistant")[turn % 2], "content": "Hi"} for turn in range(2047)]
    assert ChatTemplate(QWEN, {}).render(many).count("Hi") == 2047


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
