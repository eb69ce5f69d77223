"""Applies the rotary embedding to queries and keys, and writes keys and values to the paged cache.

One pass reads the output of the QKV product and writes the inputs of attention: rotated keys make no extra trip through
memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.ops import RotaryHeads, StepInputs
from backend.kernels.triton_lang import await_inputs, dependent_launch, kernel_view, to_cache

MOST_SINGLE_TOKENS = 1024  # of a step whose programs take one token each, because the tokens are few


@triton.jit
def _turned(places, norm, cos, sin, halves, held, eps, NORMED: tl.constexpr, HALF: tl.constexpr):
    """Return the heads at `places` (their first halves, [heads, D / 2]), normed and rotated, as fp32 with the
    reference's rounding.

    The norm is rounded as the reference rounds it: before and after the weight.
    """
    dtype = places.dtype.element_ty
    first = tl.load(places, mask=held, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=held, other=0.0).to(tl.float32)
    if NORMED:
        mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        inverse = tl.rsqrt(mean_square + eps)[:, None]
        first_weight = tl.load(norm + halves, mask=halves < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + HALF + halves, mask=halves < HALF, other=0.0).to(tl.float32)
        first = ((first * inverse).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * inverse).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    return turned_first, turned_second


@triton.jit
def _store_halves(places, first, second, held, inverse_scale, HALF: tl.constexpr):
    stored = places.dtype.element_ty
    tl.store(places, to_cache(first.to(tl.float32), inverse_scale, stored), mask=held)
    tl.store(places + HALF, to_cache(second.to(tl.float32), inverse_scale, stored), mask=held)


@triton.jit
def _angles(cos_sin, positions, tokens, num_tokens, halves, HALF: tl.constexpr):
    """Return the cosines and sines of `tokens`, whose positions are known before the step begins."""
    position = tl.load(positions + tokens, mask=tokens < num_tokens, other=0)
    places = cos_sin + position[:, None] * (2 * HALF) + halves
    return tl.load(places, mask=halves < HALF, other=0.0), tl.load(places + HALF, mask=halves < HALF, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_and_store(
    out,  # [T, Hq, D]
    qkv,  # [T, (Hq + 2 Hk) * D]
    cos_sin,  # [max_position, D] fp32
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    positions,
    slot_mapping,
    num_tokens,
    block_stride,
    head_stride,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate the query heads of one group and the key head of TOKENS tokens, and store the key and the value heads.

    Everything is loaded before anything is stored: loads do not pass stores, and a program mostly waits for them.
    """
    first_token = tl.program_id(0).to(tl.int64) * TOKENS
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    halves = tl.arange(0, BLOCK_HALF)[None, :]
    tokens = first_token + tl.arange(0, TOKENS)
    held = (tokens < num_tokens)[:, None] & (halves < HALF)
    row = tl.arange(0, TOKENS * BLOCK_G)
    query_tokens = first_token + row // BLOCK_G
    wanted = ((query_tokens < num_tokens) & (row % BLOCK_G < GROUP))[:, None] & (halves < HALF)
    slot = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)[:, None]
    cos, sin = _angles(cos_sin, positions, tokens, num_tokens, halves, HALF)
    query_cos, query_sin = _angles(cos_sin, positions, query_tokens, num_tokens, halves, HALF)

    await_inputs(PDL)
    width = (GROUP + 2) * num_kv_heads * 2 * HALF
    query = (kv_head * GROUP + row % BLOCK_G)[:, None] * (2 * HALF) + halves
    key = qkv + tokens[:, None] * width + (GROUP * num_kv_heads + kv_head) * (2 * HALF) + halves
    value = key + num_kv_heads * (2 * HALF)
    v_first = tl.load(value, mask=held, other=0.0)
    v_second = tl.load(value + HALF, mask=held, other=0.0)
    k_first, k_second = _turned(key, k_norm, cos, sin, halves, held, eps, NORMED, HALF)
    queries = qkv + query_tokens[:, None] * width + query
    first, second = _turned(queries, q_norm, query_cos, query_sin, halves, wanted, eps, NORMED, HALF)

    rotated = out + query_tokens[:, None] * (GROUP * num_kv_heads * 2 * HALF) + query
    tl.store(rotated, first, mask=wanted)
    tl.store(rotated + HALF, second, mask=wanted)
    place = slot // BLOCK_SIZE * block_stride + kv_head.to(tl.int64) * head_stride + slot % BLOCK_SIZE * (2 * HALF)
    _store_halves(k_cache + place + halves, k_first, k_second, held & (slot >= 0), inverse_k_scale, HALF)
    _store_halves(v_cache + place + halves, v_first, v_second, held & (slot >= 0), inverse_v_scale, HALF)


def tokens_of_program(tokens: int, elements: int) -> tuple[int, int]:
    """Return the tokens and the warps of a program, if half of a token's query heads of a group has `elements`."""
    of_program = 1 if tokens <= MOST_SINGLE_TOKENS else max(1, min(4, 512 // elements))
    return of_program, max(of_program, 1 if elements <= 512 else 4)


def launch_rope_and_store(
    qkv: Tensor,
    rotation: RotaryHeads,
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepInputs,
    kv_scales: tuple[float, float] = (1.0, 1.0),  # by which 8-bit keys and values are divided
) -> Tensor:
    """Launch the kernel of `reference.rope_and_store`."""
    head_dim, block_size = k_cache.shape[3], k_cache.shape[2]
    tokens, group = qkv.shape[0], rotation.num_heads // rotation.num_kv_heads
    out = qkv.new_empty((tokens, rotation.num_heads, head_dim))
    q_norm, k_norm = rotation.q_norm, rotation.k_norm
    normed = q_norm is not None and k_norm is not None
    block_g, block_half = triton.next_power_of_2(group), triton.next_power_of_2(head_dim // 2)
    of_program, warps = tokens_of_program(tokens, block_g * block_half)
    _rope_and_store[triton.cdiv(tokens, of_program), rotation.num_kv_heads](
        out,
        qkv,
        rotation.cos_sin,
        q_norm if normed else qkv,
        k_norm if normed else qkv,
        kernel_view(k_cache),
        kernel_view(v_cache),
        step.positions,
        step.slot_mapping,
        tokens,
        k_cache.stride(0),
        k_cache.stride(1),
        rotation.eps,
        1 / kv_scales[0],
        1 / kv_scales[1],
        NORMED=normed,
        GROUP=group,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        TOKENS=of_program,
        BLOCK_G=block_g,
        BLOCK_HALF=block_half,
        num_warps=warps,
        **dependent_launch(qkv.device),
    )
    return out
