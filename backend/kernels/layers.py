"""The layers of a decoder, operation by operation.

Per layer: `x += attention(norm(x))`, then `x += mlp(norm(x))`, each branch normed once more where the family does. The
running sum is called `residual`; each addition is fused with the norm that follows it, so a layer is handed the
previous branch's output apart from the sum.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from backend.kernels.ops import DecoderStack, Linear, Ops, RotaryHeads, StepInputs


def run_layers(ops: Ops, stack: DecoderStack, residual: Tensor, step: StepInputs, blocks: Tensor) -> Tensor:
    """Return the normed hidden states [T, hidden] for the embedded tokens `residual`, which is overwritten."""
    branch = torch.zeros_like(residual)
    for index, layer in enumerate(stack.layers):
        x = ops.add_rms_norm(branch, residual, layer.input_norm, stack.eps)
        qkv, output, *products = (
            partial(_adapted, ops, linear, step, index, product) for product, linear in enumerate(layer.linears)
        )
        attended = output(attention(ops, stack, index, qkv(x), step, blocks))
        if layer.attended_norm is not None:
            attended = ops.rms_norm(attended, layer.attended_norm, stack.eps)
        x = ops.add_rms_norm(attended, residual, layer.post_attention_norm, stack.eps)
        branch = feed_forward(ops.gelu_mul if stack.gelu else ops.silu_mul, products or layer.feed_forward, x)
        if layer.fed_norm is not None:
            branch = ops.rms_norm(branch, layer.fed_norm, stack.eps)
    return ops.add_rms_norm(branch, residual, stack.final_norm, stack.eps)


def feed_forward(gated: Linear, products: Sequence[Linear] | Linear, x: Tensor) -> Tensor:
    """Return the results [T, hidden] of a layer's feed-forward network, or of its experts."""
    if not isinstance(products, Sequence):
        return products(x)
    gate_up, down = products
    return down(gated(gate_up(x)))


def _adapted(ops: Ops, linear: Linear, step: StepInputs, layer: int, product: int, x: Tensor) -> Tensor:
    """Return a product, with those of the adapters of the step's rows."""
    out = linear(x)
    if step.adapters is not None:
        ops.adapt(out, x, step, layer, product)
    return out


def attention(ops: Ops, stack: DecoderStack, index: int, qkv: Tensor, step: StepInputs, blocks: Tensor) -> Tensor:
    """Store a layer's new keys and values, and return the attention of its new queries [T, Hq * D]."""
    layer = stack.layers[index]
    group, place = layer.place
    k_cache, v_cache, step = blocks[:, place, 0], blocks[:, place, 1], step.of_group(group)
    rotation = RotaryHeads(stack.num_heads, stack.num_kv_heads, layer.cos_sin, layer.q_norm, layer.k_norm, stack.eps)
    query = ops.rope_and_store(qkv, rotation, k_cache, v_cache, step)
    return ops.paged_attention(query, k_cache, v_cache, step, stack.scale, layer.window, layer.sinks).flatten(1)
