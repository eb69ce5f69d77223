"""A tensor as the header of a weight file describes it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a shard's header describes it."""

    shard: Path
    stored_as: str  # its name in the shard
    shape: tuple[int, ...]
    dtype: str  # in safetensors' words: "F32", "BF16", "I8"
    values: tuple[int, ...] | None = None  # of a quantised weight's shape, which is itself a tensor
    block_format: str | None = None  # of a quantised GGUF tensor, whose numbers are read in `dtype`: "Q4_K"
