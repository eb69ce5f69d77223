"""The oracle for every kernel: plain torch for any dtype and device, written to be read rather than to be fast.

Shapes shared by all functions of this package:

    T   tokens in the step (all sequences concatenated)        S   sequences in the step
    Hq  query heads     Hk  key/value heads (Hq % Hk == 0)     D   head dimension
    k_cache, v_cache    [num_blocks, Hk, block_size, D], strided views of one layer of the KV pool
"""

from functools import partial

import torch
from torch import Tensor

from backend.kernels.experts import ExpertProducts
from backend.kernels.integers import Weight, multiplied_out
from backend.kernels.ops import DecoderStack, ExpertWeights, Linear, RotaryHeads, StepInputs

E4M3_LARGEST = 448.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension by its root mean square, in fp32 (Zhang and Sennrich, 2019)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place, and return the normalised sum."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for `gate_up` [T, 2 * intermediate], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, by tanh (Hendrycks and Gimpel, 2016), for `gate_up` [T, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by its positions, in the half-split layout; cos and sin [T, D / 2], fp32 (Su et al., 2021)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 Hk) * D]
    rotation: RotaryHeads,
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepInputs,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots, and return the queries [T, Hq, D].

    Nothing is stored for a token whose slot is negative.
    """
    head_dim = k_cache.shape[-1]
    block_size = k_cache.shape[2]
    heads = (rotation.num_heads, rotation.num_kv_heads, rotation.num_kv_heads)
    q, k, v = qkv.view(qkv.shape[0], -1, head_dim).split(heads, dim=1)
    if rotation.q_norm is not None and rotation.k_norm is not None:
        q, k = rms_norm(q, rotation.q_norm, rotation.eps), rms_norm(k, rotation.k_norm, rotation.eps)
    cos, sin = rotation.cos_sin[step.positions].chunk(2, dim=-1)
    stored = step.slot_mapping >= 0
    slots = step.slot_mapping[stored]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = cast_to_cache(rotary_embedding(k, cos, sin)[stored], k_cache.dtype)
    v_cache[block, :, offset] = cast_to_cache(v[stored], v_cache.dtype)
    return rotary_embedding(q, cos, sin)


def cast_to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` as a cache of `dtype` holds it. For e4m3 it is rounded to nearest even, and clamped to the largest."""
    if dtype == torch.float8_e4m3fn:
        x = x.float().clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return x.to(dtype)


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepInputs,
    scale: float,
    window: int | None,  # a query sees keys at distance < window (Mistral); None: all before it
    sinks: Tensor | None = None,  # [Hq] fp32, one more score of each head, to which no value belongs (gpt-oss)
) -> Tensor:
    """Compute causal attention of each sequence's new tokens over its paged context; returns [T, Hq, D].

    The query at row i of sequence s stands at position `step.positions[i]`; keys of the step itself are already in
    the cache. Prefill, chunked prefill and decode are the same call: they differ only in rows per sequence.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[1]
    for s in range(step.num_seqs):
        start, stop = int(step.query_start[s]), int(step.query_start[s + 1])
        context, size = int(step.context_lens[s]), k_cache.shape[2]
        # blocks before the window may be another sequence's by now
        first = 0 if window is None else max(0, context - (stop - start) - window + 1) // size * size
        blocks = step.block_tables[s, first // size : -(-context // size)].long()
        k = k_cache[blocks].transpose(0, 1).flatten(1, 2)[:, : context - first].float()  # [Hk, seen, D]
        v = v_cache[blocks].transpose(0, 1).flatten(1, 2)[:, : context - first].float()
        query = q[start:stop].transpose(0, 1).unflatten(0, (-1, group)).float()  # [Hk, group, rows, D]
        scores = query @ k.unsqueeze(1).transpose(-1, -2) * scale
        distance = step.positions[start:stop].unsqueeze(1) - torch.arange(first, context, device=q.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            more = sinks.view(-1, group, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, more), -1)
        weights = scores.softmax(-1)[..., : context - first]
        out[start:stop] = (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out


def adapt(out: Tensor, x: Tensor, step: StepInputs, layer: int, product: int) -> None:
    """Add to a product's results [T, outputs] for x [T, inputs] those of each row's adapter, `B @ A @ x`: in fp32, and
    rounded once.
    """
    adapters = step.adapters
    assert adapters is not None
    rank, parts, first = adapters.rank, adapters.parts[product], adapters.first(product)
    for row in adapters.rows.unique().tolist():
        if row < 0:
            continue
        tokens = (adapters.rows == row).nonzero().flatten()
        places = adapters.vectors[row, layer, first : first + 2 * rank * len(parts)].view(2, len(parts), rank)
        given, begin = x[tokens].float(), 0
        for part, outputs in enumerate(parts):
            a = _vectors(adapters.memory, places[0, part], x.shape[1])
            b = _vectors(adapters.memory, places[1, part], outputs)
            columns = slice(begin, begin + outputs)
            out[tokens, columns] = (out[tokens, columns].float() + given @ a.t() @ b).to(out.dtype)
            begin += outputs


def _vectors(memory: Tensor, places: Tensor, width: int) -> Tensor:
    """Return the vectors [vectors, width] fp32 at these places; a negative place has none."""
    begins = places[places >= 0]
    return memory[begins.unsqueeze(1) + torch.arange(width, device=memory.device)].float()


def apply_token_bitmask(
    logits: Tensor,  # [rows, vocab] fp32, each row contiguous
    bitmasks: Tensor,  # [masks, words] int32; bit t % 32 of word t // 32: token t is allowed
    indices: Tensor,  # [rows] int32, the mask of each row; negative: the row stays unchanged
) -> None:
    """Write -inf over the logits of tokens that a row's mask does not allow, and of tokens beyond its words."""
    for row, index in enumerate(indices.tolist()):
        if index >= 0:
            bits = bitmasks[index].unsqueeze(1) >> torch.arange(32, device=logits.device) & 1
            allowed = bits.flatten()[: logits.shape[1]].bool()
            logits[row, : len(allowed)].masked_fill_(~allowed, -torch.inf)
            logits[row, len(allowed) :] = -torch.inf


def linear(weight: Weight, bias: Tensor | None) -> Linear:
    """Return the product with `weight` [out_features, in_features], which is not repacked."""
    return partial(torch.nn.functional.linear, weight=multiplied_out(weight), bias=bias)


def experts(weights: ExpertWeights) -> Linear:
    """Return the sum of each row's experts' results by their weights; see `Ops.experts`."""
    return ExpertProducts.of(weights, linear(weights.router, weights.router_bias), linear, silu_mul)


def one_by_one(stack: DecoderStack) -> None:
    """Return None: a decoder calls the operations one by one."""


class ReferenceOps:
    """The functions of this module as the `Ops` that a decoder takes."""

    linear = staticmethod(linear)
    experts = staticmethod(experts)
    fuse = staticmethod(one_by_one)
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    rope_and_store = staticmethod(rope_and_store)
    paged_attention = staticmethod(paged_attention)
    adapt = staticmethod(adapt)
    apply_token_bitmask = staticmethod(apply_token_bitmask)
    batch_invariant = False  # torch's products add in an order that depends on the number of rows
    captures = False
    sample = None
