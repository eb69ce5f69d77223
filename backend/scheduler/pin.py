"""Pins keep cached blocks where they are for somebody who holds no slot."""

from dataclasses import dataclass, field
from typing import Protocol

from backend.paged_kv.prefix_cache import Holder


class BlockHolder(Holder, Protocol):
    """A sequence or a pin: it holds the blocks of its table, and its tenant is charged for some of them on its account.

    Compared by identity. The fields are those of `Sequence`.
    """

    @property
    def id(self) -> str: ...

    block_table: list[int]
    num_shared_blocks: int
    num_charged_blocks: int
    num_computed_tokens: int
    kv_block_seconds: float
    held_since: float


@dataclass(slots=True, eq=False)
class Pin:
    """Holds the blocks that a waiting sequence was found to begin with, until it has a slot or has ended."""

    id: str
    tenant: str
    block_table: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0
    num_charged_blocks: int = 0
    num_computed_tokens: int = 0
    kv_block_seconds: float = 0.0
    held_since: float = 0.0
