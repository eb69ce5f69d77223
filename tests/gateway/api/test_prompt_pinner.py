"""What the engine is told of pinned prompts, over an engine on paper."""

from collections.abc import Collection

import pytest

from backend.adapter import Adapter, make_adapter
from backend.paged_kv.block_names import BlockName, BlockNames
from backend.text.chat_template import ChatTemplate
from backend.text.tokenizer import Tokenizer
from gateway.api.prompt_names import PromptNames
from gateway.api.prompt_pinner import PinnedPrefix, PromptPinner
from gateway.tenants.pinned_prompts import PinnedPrompts
from tests.backend.tiny_tokenizers import byte_level_bpe
from tests.quotas.policies import parsed

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT, OTHER = "Be brief, and say why.", "Be brief, and smile."
BLOCK = 4
PINS = f"{{prefix_cache: {{pinned: ['{PROMPT}']}}}}"


class Engine:
    """Remembers what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[BlockName]]] = []

    def pin_prefixes(self, tenant: str, names: Collection[BlockName]) -> None:
        self.told.append((tenant, list(names)))

    def take(self) -> list[tuple[str, list[BlockName]]]:
        told, self.told = self.told, []
        return told


class Rig:
    def __init__(self) -> None:
        self.engine, self.names = Engine(), PromptNames(BlockNames(b"secret", BLOCK), BLOCK)
        self.prompts = PinnedPrompts(Tokenizer(byte_level_bpe(), None, ChatTemplate(CHAT, {})), BLOCK)
        self.adapters: dict[str, Adapter] = {}
        self.pinner = PromptPinner(self.engine, self.prompts, self.names, self.adapters.get)

    async def named(self, prompt: str, scope: str, adapter: Adapter | None = None) -> list[BlockName]:
        prefix = PinnedPrefix(list(self.prompts.tokens(prompt)))
        self.names.begin([prefix], scope, None, adapter)
        await self.names.name([prefix])
        return prefix.block_names


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_blocks_are_named_like_the_tenants_requests(rig: Rig) -> None:
    await rig.pinner.policy_changed(parsed(f"tenants: {{b: {PINS}, a: {PINS}, c: }}"))
    told = rig.engine.take()
    assert told == [("a", await rig.named(PROMPT, "tenant:a")), ("b", await rig.named(PROMPT, "tenant:b"))]
    assert not {*told[0][1]} & {*told[1][1]}, "tenants share nothing"


async def test_prompts_that_begin_alike_share_their_first_blocks(rig: Rig) -> None:
    await rig.pinner.policy_changed(parsed(f"tenants: {{a: {{prefix_cache: {{pinned: ['{PROMPT}', '{OTHER}']}}}}}}"))
    ((_, names),) = rig.engine.take()
    first, second = await rig.named(PROMPT, "tenant:a"), await rig.named(OTHER, "tenant:a")
    assert len(names) == len({*first, *second}) < len(first) + len(second)
    assert names[: len(first)] == first


async def test_an_edit_tells_what_has_changed_and_lets_go_first(rig: Rig) -> None:
    await rig.pinner.policy_changed(parsed(f"tenants: {{a: {PINS}, c: {PINS}}}"))
    rig.engine.take()
    await rig.pinner.policy_changed(parsed(f"tenants: {{a: {PINS}, b: {PINS}, c: {{weight: 2}}}}"))
    assert [(tenant, bool(names)) for tenant, names in rig.engine.take()] == [("c", False), ("b", True)]
    await rig.pinner.policy_changed(parsed(f"tenants: {{a: {PINS}, b: {PINS}, c: {{weight: 3}}}}"))
    assert rig.engine.take() == []


async def test_sharing_groups_change_the_pinned_blocks(rig: Rig) -> None:
    await rig.pinner.policy_changed(parsed(f"tenants: {{a: {PINS}, b: }}"))
    alone = dict(rig.engine.take())
    grouped = parsed(f"tenants: {{a: {PINS}, b: {PINS}}}\nprefix_sharing: {{both: [a, b]}}")
    await rig.pinner.policy_changed(grouped)
    told = dict(rig.engine.take())
    assert told["a"] == told["b"] == await rig.named(PROMPT, grouped.cache_scope("a"))
    assert not {*told["a"]} & {*alone["a"]}


async def test_a_prompt_is_pinned_as_the_default_adapter_of_its_tenant_reads_it(rig: Rig) -> None:
    await rig.pinner.policy_changed(parsed(f"tenants: {{a: {PINS[:-1]}, default_adapter: law}}, b: {PINS}}}"))
    rig.engine.take()
    law = rig.adapters["law"] = make_adapter("law", "weights", 1, 1)
    await rig.pinner.pin_anew()
    assert rig.engine.take() == [("a", await rig.named(PROMPT, "tenant:a", law))]


async def test_where_no_block_is_shared_nothing_is_told(rig: Rig) -> None:
    await PromptPinner(rig.engine, rig.prompts, None).policy_changed(parsed(f"tenants: {{a: {PINS}}}"))
    assert rig.engine.take() == []


async def test_a_pin_that_the_engine_did_not_take_is_told_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = parsed(f"tenants: {{a: {PINS}}}")
    with monkeypatch.context() as broken:
        broken.delattr(Engine, "pin_prefixes")
        with pytest.raises(AttributeError):
            await rig.pinner.policy_changed(policy)
    await rig.pinner.policy_changed(policy)
    assert rig.engine.take() == [("a", await rig.named(PROMPT, "tenant:a"))]
