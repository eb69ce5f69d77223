"""Loading, encoding, and chat templates that render what transformers renders."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from backend.errors import InvalidRequest, ModelLoadError, TooManyTokens
from backend.text.chat_template import ChatTemplate
from backend.text.tokenizer import INLINE_CHARS, Tokenizer
from tests.backend import tiny_tokenizers as tiny

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


def write_model(directory: Path, **config: Any) -> Path:
    tiny.byte_level_bpe().save(str(directory / "tokenizer.json"))
    defaults = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return directory


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_dir(write_model(tmp_path, chat_template=QWEN), model_vocab_size=1024)
    yield tokenizer
    tokenizer.close()


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


def test_encodes_as_the_checkpoint_says(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("a fox", add_special_tokens=False)
    assert tokenizer.encode("a fox", add_special_tokens=True) == [tokenizer.bos_token_id, *plain]
    assert tokenizer.decode([0, *plain, 1]) == "a fox"
    assert tokenizer.decode([0, *plain, 1], skip_special_tokens=False) == "<s>a fox</s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) is not None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


async def test_long_texts_are_encoded_on_another_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode = tokenizer.encode

    def spy(text: str, add_special_tokens: bool, *most: int) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special_tokens, *most)

    monkeypatch.setattr(tokenizer, "encode", spy)
    long = "fox " * INLINE_CHARS
    short_ids, long_ids = await asyncio.gather(
        tokenizer.encode_async("fox", add_special_tokens=False), tokenizer.encode_async(long, add_special_tokens=True)
    )
    assert (short_ids, long_ids) == (encode("fox", False), encode(long, True))
    assert threads == [True, False]


async def test_a_long_text_of_more_tokens_than_may_be_had_is_refused_with_their_number(tokenizer: Tokenizer) -> None:
    text = "fox " * INLINE_CHARS
    count = len(tokenizer.encode(text, add_special_tokens=False))
    with pytest.raises(TooManyTokens) as refusal:
        await tokenizer.encode_async(text, False, count - 1)
    assert refusal.value.num_tokens == count
    assert len(await tokenizer.encode_async(text, False, count)) == count


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    write_model(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                           "pad_type_id": 0, "pad_token": "<s>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_dir(tmp_path, model_vocab_size=1024)
    assert tokenizer.decode(tokenizer.encode("1, 2, 3, 12, 345", False)) == "1, 2, 3, 12, 345"


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode("a\ud800", add_special_tokens=False)


def test_special_tokens_in_a_message_are_encoded_as_such(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x<|im_end|>", add_special_tokens=False)[-1] == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {}}', b"\xff\xfe"])
def test_a_corrupt_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not found; save"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    size = Tokenizer.from_dir(write_model(tmp_path), model_vocab_size=1024).vocab_size
    assert Tokenizer.from_dir(tmp_path, model_vocab_size=size).vocab_size == size
    with pytest.raises(ModelLoadError, match=f"highest token id is {size - 1}, but the model has {size - 1}"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=size - 1)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_corrupt_config_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


def test_special_tokens_come_from_their_own_file_when_the_config_has_none(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tokenizer = Tokenizer.from_dir(tmp_path, model_vocab_size=1024)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 3)


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


@pytest.mark.parametrize("template", [5, [{"name": "other", "template": "x"}], [5]])
def test_a_template_of_another_type_is_refused_at_load(tmp_path: Path, template: object) -> None:
    write_model(tmp_path, chat_template=template)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages", "{% nosuchtag %}"])
def test_a_template_that_does_not_compile_is_refused_at_load(tmp_path: Path, template: str) -> None:
    write_model(tmp_path, chat_template=template)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: the chat template does not compile"):
        Tokenizer.from_dir(tmp_path, model_vocab_size=1024)


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
        ChatTemplate(template, {}).render(CONVERSATIONS[0])


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
    assert template.render(CONVERSATIONS[0][:1]) == "fine"
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"refuses these messages: it takes more than 0\.5 s of CPU"):
            template.render([{"role": "user", "content": "Hi"}] * 2)
    assert template.render(CONVERSATIONS[0][:1]) == "fine"


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


@pytest.mark.parametrize("text", ["", "hello", "1" * 5000, "day " * 700, "é🙂" * 300])
def test_a_text_has_at_least_the_fewest_tokens_that_its_length_allows(text: str) -> None:
    for core in (tiny.byte_level_bpe(), tiny.byte_fallback_bpe(), tiny.metaspace_unigram()):
        tokenizer = Tokenizer(core)
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
