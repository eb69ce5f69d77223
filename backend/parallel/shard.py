"""A shard is one rank's part of a tensor-parallel model: heads, intermediate columns, rows of the vocabulary.

The split is Megatron-LM's (Shoeybi et al., 2019): the products into heads and into the intermediate layer are cut by
their outputs, the products out of them by their inputs, so that each block of a layer ends with one sum over the ranks.
"""

from dataclasses import dataclass, replace
from math import gcd, isqrt
from typing import Self

from backend.errors import ConfigError
from backend.model.model_config import ModelConfig

INTERMEDIATE_UNIT = 64  # columns that stay together where there are enough: whole tiles of a matrix product

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """The parts that rank `rank` of `size` holds, none of which is empty. Ranks may hold unequal parts.

    Keys and values are cut by heads while there are at least as many KV heads as ranks. With more ranks, ranks share a
    KV head: each holds a copy, and they divide its query heads.
    """

    rank: int
    size: int
    heads: range
    kv_heads: range
    intermediate: range  # columns of the feed-forward network, of `intermediate_size`
    vocab: range
    all_kv_heads: int  # KV heads that all ranks together hold, copies counted

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Self:
        """Return the shard of a rank. Raises `ConfigError` if a rank would have an empty part."""
        for what, count in (
            ("attention heads", config.num_heads),
            ("columns of the feed-forward network", config.intermediate_size),
            ("rows of tokens", isqrt(config.vocab_size)),  # with more ranks the last might have no rows
        ):
            if count < size:
                raise ConfigError(
                    f"tensor_parallel {size}: the model has {count} {what}, and each rank needs one: choose at most "
                    f"{count}"
                )
        heads, kv_heads = _heads(config, rank, size)
        unit = gcd(config.intermediate_size, INTERMEDIATE_UNIT)
        while config.intermediate_size // unit < size:
            unit //= 2
        units = _part(config.intermediate_size // unit, rank, size)
        rows = rows_per_rank(config.vocab_size, size)
        return cls(
            rank=rank,
            size=size,
            heads=heads,
            kv_heads=kv_heads,
            intermediate=range(units.start * unit, units.stop * unit),
            vocab=range(min(rank * rows, config.vocab_size), min((rank + 1) * rows, config.vocab_size)),
            all_kv_heads=max(config.num_kv_heads, size),
        )

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of this rank's layers. The vocabulary stays whole, because logits are of all tokens."""
        return replace(
            config, num_heads=len(self.heads), num_kv_heads=len(self.kv_heads), intermediate_size=len(self.intermediate)
        )

    def stored(self, config: ModelConfig) -> ModelConfig:
        """Return the shape whose weights take as much memory as this rank's."""
        return replace(self.part_of(config), vocab_size=rows_per_rank(config.vocab_size, self.size))

    def slices(self, name: str, config: ModelConfig) -> Slices:
        """Return this rank's part of a stored tensor, by the tensor's name in a checkpoint; () for all of it."""
        *_, module, kind = name.split(".")
        heads, kv_heads = _slice(self.heads, config.head_dim), _slice(self.kv_heads, config.head_dim)
        vocab, intermediate = _slice(self.vocab), _slice(self.intermediate)
        by_output = {
            "embed_tokens": vocab,
            "lm_head": vocab,
            "q_proj": heads,
            "k_proj": kv_heads,
            "v_proj": kv_heads,
            "gate_proj": intermediate,
            "up_proj": intermediate,
        }
        by_input = {"o_proj": heads, "down_proj": intermediate} if kind == "weight" else {}
        if module in by_output:
            return (by_output[module],)
        if kind == "sinks":
            return (_slice(self.heads),)
        if module == "experts":  # of all experts together, gates and what they multiply in turns
            in_turns, whole = _slice(self.intermediate, 2), slice(None)
            return {
                "gate_up_proj": (whole, whole, in_turns),
                "gate_up_proj_bias": (whole, in_turns),
                "down_proj": (whole, intermediate, whole),
            }.get(kind, ())
        return (slice(None), by_input[module]) if module in by_input else ()


def pooled(config: ModelConfig, shard: Shard | None) -> ModelConfig:
    """Return the shape whose keys and values are those of all ranks together; without a shard, `config` itself."""
    return config if shard is None else replace(config, num_kv_heads=shard.all_kv_heads)


def rows_per_rank(vocab_size: int, size: int) -> int:
    """Return the rows of a matrix over the vocabulary that each rank has room for: the last rank may have fewer."""
    return -(-vocab_size // size)


def _heads(config: ModelConfig, rank: int, size: int) -> tuple[range, range]:
    """Return a rank's query heads, and the KV heads that they attend to."""
    group = config.num_heads // config.num_kv_heads
    if size <= config.num_kv_heads:
        kv_heads = _part(config.num_kv_heads, rank, size)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    ranks_of = [_part(size, kv_head, config.num_kv_heads) for kv_head in range(config.num_kv_heads)]
    kv_head, ranks = next((kv_head, ranks) for kv_head, ranks in enumerate(ranks_of) if rank in ranks)
    part = _part(group, rank - ranks.start, len(ranks))  # not empty: there are as many query heads as ranks
    return range(kv_head * group + part.start, kv_head * group + part.stop), range(kv_head, kv_head + 1)


def _part(count: int, index: int, parts: int) -> range:
    """Return part `index` of `parts` parts of `range(count)`; the first parts have one more."""
    least, more = divmod(count, parts)
    start = index * least + min(index, more)
    return range(start, start + least + (index < more))


def _slice(part: range, width: int = 1) -> slice:
    return slice(part.start * width, part.stop * width)
