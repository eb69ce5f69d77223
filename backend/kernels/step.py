"""The tensors that describe one step to the kernels."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's ragged batch. T tokens of S sequences, each sequence's tokens contiguous and in order.

    A row of `block_tables` is valid for the blocks that `context_lens` needs; the rest is padding (0). A sequence
    without tokens or context is padding, and so are tokens after those of the last sequence: whatever is computed for
    them is theirs alone, and a negative slot stores nothing.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, each token's index in its own sequence
    slot_mapping: Tensor  # [T] int64, block * block_size + offset where the token's key and value go; -1: nowhere
    query_start: Tensor  # [S + 1] int32, first row of each sequence
    context_lens: Tensor  # [S] int32, tokens in the cache once this step's own are stored
    block_tables: Tensor  # [S, width] int32
    num_seqs: int
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0  # leading sequences that have one token each, at row s for sequence s, or none
