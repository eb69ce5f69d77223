"""The operations in plain torch, for machines without a kernel library."""

import torch
from torch import Tensor
from torch.nn import functional

from backend.kernels import reference
from backend.kernels.experts import ExpertProducts
from backend.kernels.integers import Weight, multiplied_out
from backend.kernels.linear import best_linear
from backend.kernels.ops import ExpertWeights, Linear, StepInputs


class TorchOps:
    """The operations of `reference` with packed linears, and torch's fused attention one sequence at a time.

    The batch is never padded into one tensor, which would cost 4 to 24 times more than the loop.
    """

    fuse = staticmethod(reference.one_by_one)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    silu_mul = staticmethod(reference.silu_mul)
    gelu_mul = staticmethod(reference.gelu_mul)
    rope_and_store = staticmethod(reference.rope_and_store)
    adapt = staticmethod(reference.adapt)
    apply_token_bitmask = staticmethod(reference.apply_token_bitmask)
    batch_invariant = False  # torch's attention adds in an order that depends on the number of queries
    captures = False
    sample = None

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return best_linear(multiplied_out(weight), bias)

    def experts(self, weights: ExpertWeights) -> Linear:
        return ExpertProducts.of(weights, self.linear(weights.router, weights.router_bias), self.linear, self.silu_mul)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepInputs,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q)
        starts, contexts = step.query_start.tolist(), step.context_lens.tolist()
        for s in range(step.num_seqs):
            rows = slice(starts[s], starts[s + 1])
            k, v = gather_context(k_cache, v_cache, step.block_tables[s], contexts[s], rows, window)
            out[rows] = attend(q[rows], k.to(q.dtype), v.to(q.dtype), scale, window, sinks)
        return out


def gather_context(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context: int, rows: slice, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values [Hk, seen, D] that the sequence's new `rows` see: its context, cut by the window."""
    block_size = k_cache.shape[2]
    first = 0 if window is None else max(0, context - (rows.stop - rows.start) - window + 1)
    first_block = first // block_size
    blocks = block_table[first_block : -(-context // block_size)]
    seen = slice(first - first_block * block_size, context - first_block * block_size)
    k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, seen] for cache in (k_cache, v_cache))
    return k, v


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """Compute causal attention of q [rows, Hq, D], the last rows of the context, over k and v [Hk, seen, D]."""
    rows, num_heads, head_dim = q.shape
    group = num_heads // k.shape[0]
    if sinks is not None:
        return _attend_with_sinks(q, k, v, scale, window, sinks)
    if rows == 1:
        folded = q.view(1, k.shape[0], group, head_dim)
        return functional.scaled_dot_product_attention(folded, k[None], v[None], scale=scale).view_as(q)
    query = q.view(rows, k.shape[0], group, head_dim).permute(1, 2, 0, 3)  # [Hk, group, rows, D]
    k, v = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    causal = k.shape[2] == rows
    mask = None if causal and window is None else visible(rows, k.shape[2], window, q.device)
    result = functional.scaled_dot_product_attention(query, k, v, mask, is_causal=mask is None, scale=scale)
    return result.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)


SINKS_MASK_BYTES = 1 << 26  # of the rows whose scores' mask is made at once


def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor) -> Tensor:
    """Compute `attend` with one more key of each head: 0, whose score is the mask's, and whose value is 0. The mask has
    a number of each head, row and key, so that rows are computed a few at a time.
    """
    rows, num_heads, _ = q.shape
    seen, group = k.shape[1], num_heads // k.shape[0]
    k, v = (functional.pad(x, (0, 0, 0, 1)).repeat_interleave(group, 0) for x in (k, v))
    most = max(1, SINKS_MASK_BYTES // (num_heads * (seen + 1) * q.element_size()))
    parts = []
    for part, keys in zip(q.split(most), visible(rows, seen, window, q.device).split(most), strict=True):
        mask = torch.zeros((num_heads, len(part), seen + 1), dtype=q.dtype, device=q.device)
        mask[:, :, :seen].masked_fill_(~keys, float("-inf"))
        mask[:, :, seen] = sinks.to(q.dtype).unsqueeze(1)
        parts.append(functional.scaled_dot_product_attention(part.transpose(0, 1), k, v, mask, scale=scale))
    return torch.cat(parts, dim=1).transpose(0, 1)


def visible(rows: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [rows, seen] bool of keys that each of the last `rows` queries may use."""
    last = torch.arange(seen - rows, seen, device=device).unsqueeze(1)
    distance = last - torch.arange(seen, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
