"""System prompts in tokens, and prompts that do not fit."""

from dataclasses import replace

import pytest

from backend.config import EngineConfig
from backend.text.chat_template import ChatTemplate
from backend.text.tokenizer import Tokenizer
from gateway.tenants.cache_limits import KVPool
from gateway.tenants.pinned_prompts import PinnedPrompts, pinned_problems
from tests.backend.tiny_tokenizers import byte_level_bpe
from tests.quotas.policies import parsed

BLOCK = 4
MIB = 2**20
POOL = KVPool.of(EngineConfig(num_blocks=100, block_size=BLOCK, max_model_len=160, max_num_seqs=8), MIB)
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}" + CHAT
LONG = "The quick brown fox jumps over the lazy dog. " * 8


def prompts(template: str | None = CHAT) -> PinnedPrompts:
    return PinnedPrompts(Tokenizer(byte_level_bpe(), None, ChatTemplate(template, {}) if template else None), BLOCK)


def found(text: str, pool: KVPool = POOL, template: str | None = CHAT) -> list[tuple[str, str]]:
    return list(pinned_problems(parsed(text), pool, prompts(template)))


def pinning(text: str, tenants: str = "a") -> str:
    pins = f"{{prefix_cache: {{pinned: ['{text}']}}}}"
    return f"tenants: {{{', '.join(f'{name}: {pins}' for name in tenants)}}}"


@pytest.mark.parametrize("system", ["Be brief.", LONG, "日本語のテキスト", "ends in a line\n"])
@pytest.mark.parametrize("user", ["A", "hello", "\n\n", "  ", "9", "語", "<|im_end|>"])
def test_every_conversation_with_the_prompt_begins_with_its_tokens(system: str, user: str) -> None:
    tokenizer = Tokenizer(byte_level_bpe(), None, ChatTemplate(CHAT, {}))
    tokens = PinnedPrompts(tokenizer, BLOCK).tokens(system)
    said = tokenizer.render_chat([{"role": "system", "content": system}, {"role": "user", "content": user}])
    whole = tokenizer.encode_text(said, add_special_tokens=False)
    assert list(tokens) == whole[: len(tokens)]
    before = said[: said.index("user\n")]
    assert len(tokenizer.encode_text(before, False)) // BLOCK * BLOCK <= len(tokens), "all of it that fills blocks"


def test_a_prompt_that_the_model_cannot_have_is_refused() -> None:
    ((field, message),) = found(pinning("Be brief."), template=None)
    assert field == "tenants.a.prefix_cache.pinned"
    assert message.startswith('"Be brief." cannot be pinned: this model has no chat template')
    ((_, message),) = found(pinning("Be brief."), template=NO_SYSTEM)
    assert "cannot be pinned: the chat template refuses these messages: no system prompts" in message
    large = KVPool.of(EngineConfig(num_blocks=100, block_size=64, max_model_len=640, max_num_seqs=8), MIB)
    problems = pinned_problems(parsed(pinning("Be brief.")), large, PinnedPrompts(prompts()._tokenizer, block_size=64))
    assert "fills no block of 64 tokens: leave it out" in next(problems)[1]


def test_where_nothing_is_cached_nothing_can_stay_and_no_policy_is_refused() -> None:
    config = EngineConfig(num_blocks=100, block_size=BLOCK, max_model_len=160, max_num_seqs=8, prefix_cache=False)
    assert found(pinning("Be brief."), KVPool.of(config, MIB), None) == []


def test_prompts_may_take_half_of_the_pool_and_no_more() -> None:
    each = len(prompts().tokens(LONG.strip())) // BLOCK
    fits = 50 // each
    tenants = "abcdefgh"
    assert found(pinning(LONG.strip(), tenants[:fits])) == []
    ((field, message),) = found(pinning(LONG.strip(), tenants[: fits + 1]))
    assert field == "tenants.a.prefix_cache.pinned"
    taken = each * (fits + 1)
    assert message.startswith(
        f"system prompts take {taken}.00 MiB ({taken} blocks) in all, and may take 50.00 MiB (50 blocks): half of"
    )


def test_of_layers_with_a_window_every_group_is_pinned() -> None:
    each = len(prompts().tokens(LONG.strip())) // BLOCK
    config = EngineConfig(num_blocks=500, block_size=BLOCK, max_model_len=160, max_num_seqs=8, window_groups=5)
    fits, tenants = 250 // (6 * each), "abcdefgh"
    assert found(pinning(LONG.strip(), tenants[:fits]), KVPool.of(config, MIB)) == []
    ((_, message),) = found(pinning(LONG.strip(), tenants[: fits + 1]), KVPool.of(config, MIB))
    assert message.startswith(f"system prompts take {6 * each * (fits + 1)}.00 MiB")


def test_prompts_leave_room_for_floors_and_the_longest_sequence() -> None:
    each = len(prompts().tokens(LONG.strip())) // BLOCK
    text = pinning(LONG.strip()).replace("pinned:", "floor: {}MiB, pinned:".replace("{}", str(60 - each + 1)))
    ((_, message),) = found(text)
    assert f"may take {each - 1}.00 MiB ({each - 1} blocks)" in message
    assert f"floors ({60 - each + 1}.00 MiB ({60 - each + 1} blocks))" in message
    assert "one sequence of max_model_len 160 (40.00 MiB (40 blocks))" in message
    ((_, message),) = found(pinning(LONG.strip()), replace(POOL, adapter=60 - each + 1))
    assert f"may take {each - 1}.00 MiB" in message and "max_model_len 160 with the largest adapter" in message
