"""Writes -inf over the logits of tokens that a mask does not allow, without reading logits."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _apply_token_bitmask(logits, row_stride, bitmasks, words, indices, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + row).to(tl.int64)
    if index >= 0:
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(bitmasks + index * words + tokens // 32, mask=tokens // 32 < words, other=0)
        forbidden = (tokens < vocab) & (((word >> (tokens % 32)) & 1) == 0)
        tl.store(logits + row * row_stride + tokens, tl.full([BLOCK], -float("inf"), tl.float32), mask=forbidden)


def launch_apply_token_bitmask(logits: Tensor, bitmasks: Tensor, indices: Tensor) -> None:
    """Launch the kernel of `reference.apply_token_bitmask`; `bitmasks` is contiguous."""
    assert logits.stride(1) == 1
    assert bitmasks.is_contiguous()
    rows, vocab = logits.shape
    _apply_token_bitmask[rows, triton.cdiv(vocab, BLOCK)](
        logits, logits.stride(0), bitmasks, bitmasks.shape[1], indices, vocab, BLOCK=BLOCK, num_warps=4
    )
