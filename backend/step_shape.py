"""The numbers that a step's launches depend on: steps of one shape can be replayed from one graph."""

from dataclasses import dataclass
from operator import add
from typing import Self

from backend.batch import Batch


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many sequences and tokens a step computes, those that pad it included.

    Places of sequences are padded part by part: `num_decodes` for those of one token each, then `num_prompts`, and a
    place that is left has no tokens. Tokens follow each other without a gap, and padding comes after all of them.
    """

    num_decodes: int
    num_prompts: int
    num_tokens: int
    max_query_len: int
    max_context_len: int

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Without padding."""
        return cls(
            num_decodes=batch.num_decodes,
            num_prompts=len(batch.slots) - batch.num_decodes,
            num_tokens=sum(batch.lengths),
            max_query_len=max(batch.lengths),
            max_context_len=max(map(add, batch.starts, batch.lengths)),
        )

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_prompts
