"""The system prompts that a policy pins, in tokens, and the problems of pins that do not fit the KV memory."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import takewhile

from backend.errors import InvalidRequest
from backend.text.tokenizer import Tokenizer
from gateway.tenants.cache_limits import KVPool, floors_of, show_blocks
from quotas.policy.policy import Policy
from quotas.policy.problems import quoted

PROBES = ("A", "7", "\n")  # first user messages, as different as possible
MAX_CACHED_PROMPTS = 1024  # tokenized prompts kept between policies
POOL_BLOCKS_PER_PINNABLE = 2  # half of the pool may be pinned


class PinnedPrompts:
    """Tokenizes system prompts; on any thread."""

    def __init__(self, tokenizer: Tokenizer, block_size: int) -> None:
        self._tokenizer = tokenizer
        self.block_size = block_size
        self.tokens = lru_cache(MAX_CACHED_PROMPTS)(self._tokens)

    def _tokens(self, system: str) -> tuple[int, ...]:
        """The tokens, in whole blocks, shared by all conversations with this system prompt.

        Raises `InvalidRequest` for a prompt that the model's chat template refuses.
        """
        first, *others = (self._conversation(system, user) for user in PROBES)
        alike = [len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, other)))) for other in others]  # noqa: B905
        return tuple(first[: min(alike) // self.block_size * self.block_size])

    def _conversation(self, system: str, user: str) -> list[int]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return self._tokenizer.encode_text(self._tokenizer.render_chat(messages), add_special_tokens=False)


def pinned_problems(policy: Policy, pool: KVPool, prompts: PinnedPrompts) -> Iterator[tuple[str, str]]:
    """Yield each field of the policy with a pin that cannot stay, and the problem."""
    if not pool.caches:
        return
    blocks: dict[str, int] = {}
    for tenant, kept in policy.caching.items():
        field_name = f"tenants.{tenant}.prefix_cache.pinned"
        for system in kept.pinned:
            try:
                count = len(prompts.tokens(system)) // prompts.block_size * pool.blocks_per_place
            except InvalidRequest as error:
                yield field_name, f"{quoted(system)} cannot be pinned: {error}"
                continue
            blocks[tenant] = blocks.get(tenant, 0) + count
            if not count:
                yield field_name, f"{quoted(system)} fills no block of {prompts.block_size} tokens: leave it out"
    yield from _too_many(policy, pool, blocks)


def _too_many(policy: Policy, pool: KVPool, blocks: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the largest pin if all pins exceed their share, or leave no room for the longest sequence."""
    pinned, share = sum(blocks.values()), pool.num_blocks // POOL_BLOCKS_PER_PINNABLE
    floors = sum(floors_of(policy, pool).values())
    room = min(share, pool.num_blocks - pool.most_of_one - floors)
    if pinned <= max(room, 0):
        return
    largest = max(sorted(blocks), key=lambda tenant: blocks[tenant])
    message = (
        f"system prompts take {show_blocks(pinned, pool)} in all, and may take {show_blocks(max(room, 0), pool)}: half "
        f"of the KV pool of {show_blocks(pool.num_blocks, pool)}, and no more than floors "
        f"({show_blocks(floors, pool)}) and {pool.one_sequence} ({show_blocks(pool.most_of_one, pool)}) "
        "leave: pin shorter or fewer ones, lower floors, or raise --kv-memory-bytes"
    )
    yield f"tenants.{largest}.prefix_cache.pinned", message
