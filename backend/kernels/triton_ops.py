"""The operations on an NVIDIA GPU: cuBLAS' products, and Triton kernels between them."""

import torch
from torch import Tensor

from backend.kernels.few_rows import FewRowLayers, Product
from backend.kernels.grouped import GroupedExperts
from backend.kernels.integers import ROUNDED_BITS, StoredWeight, Weight, multiplied_out, rounded, unpacked
from backend.kernels.low_rank import launch_adapt
from backend.kernels.ops import DecoderStack, ExpertWeights, Linear, RotaryHeads, RunLayers, StepInputs
from backend.kernels.packed_product import PackedProduct, PackedWeight
from backend.kernels.paged_decode import paged_decode
from backend.kernels.paged_prefill import paged_prefill
from backend.kernels.rowwise import launch_add_rms_norm, launch_gelu_mul, launch_rms_norm, launch_silu_mul
from backend.kernels.sampling import sample_rows
from backend.kernels.store_kv import launch_rope_and_store
from backend.kernels.token_bitmask import launch_apply_token_bitmask


class TritonOps:
    """`Ops` by Triton kernels, for fp16, bf16 and fp32, and caches of those types or of e4m3.

    No operation waits for the device or reads back from it; launches depend on `StepInputs`' host numbers alone, so
    that a CUDA graph of a step holds for every step with the same ones. 8-bit keys and values are stored divided by
    `kv_scales`.

    With a `quantization` of `int4`, `int8` or `fp8` weights of products are rounded, and with `stored` the integers of
    a file stay: `packed_product` multiplies with them. Weights are moved to `device`; None: they lie where they are
    used.
    """

    batch_invariant = False  # cuBLAS adds in an order that depends on the number of rows
    captures = True
    rms_norm = staticmethod(launch_rms_norm)
    add_rms_norm = staticmethod(launch_add_rms_norm)
    silu_mul = staticmethod(launch_silu_mul)
    gelu_mul = staticmethod(launch_gelu_mul)
    adapt = staticmethod(launch_adapt)
    apply_token_bitmask = staticmethod(launch_apply_token_bitmask)
    sample = staticmethod(sample_rows)

    def __init__(
        self,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        quantization: str = "none",
        device: torch.device | None = None,
    ) -> None:
        self._kv_scales = kv_scales
        self._quantization = quantization
        self._device = device

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, StoredWeight):
            if self._quantization == "stored":
                parts = tuple(PackedWeight.of_integers(part).to(self._device) for part in unpacked(weight))
                return PackedProduct(parts, bias)
            return Product(multiplied_out(weight).to(device=self._device), bias)
        weight = weight.to(device=self._device)
        if self._quantization == "fp8":
            return PackedProduct((PackedWeight.rounded_to_e4m3(weight),), bias)
        if self._quantization in ROUNDED_BITS:
            integers = rounded(weight, ROUNDED_BITS[self._quantization])
            return PackedProduct((PackedWeight.of_integers(integers),), bias)
        return Product(weight, bias)

    def experts(self, weights: ExpertWeights) -> Linear:
        return GroupedExperts(Product(weights.router, weights.router_bias), weights)

    def fuse(self, stack: DecoderStack) -> RunLayers | None:
        return FewRowLayers.of(self, stack)

    def rope_and_store(
        self, qkv: Tensor, rotation: RotaryHeads, k_cache: Tensor, v_cache: Tensor, step: StepInputs
    ) -> Tensor:
        assert qkv.is_contiguous()
        return launch_rope_and_store(qkv, rotation, k_cache, v_cache, step, self._kv_scales)

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
        """Compute attention: leading decodes by the kernel that splits contexts, all others by the prefill kernel."""
        assert q.is_contiguous()
        out = torch.empty_like(q)
        # Sequences of one token each are all decodes, unless places without a token have no row to write to.
        has_rows = step.max_query_len == 1 and step.num_seqs <= q.shape[0]
        decodes = step.num_seqs if has_rows else step.num_decodes
        if decodes:
            paged_decode(
                out,
                q,
                k_cache,
                v_cache,
                step.context_lens,
                step.block_tables,
                decodes,
                scale,
                window,
                self._kv_scales,
                sinks,
            )
        if decodes < step.num_seqs:
            paged_prefill(
                out,
                q,
                k_cache,
                v_cache,
                step.query_start,
                step.context_lens,
                step.block_tables,
                decodes,
                step.num_seqs,
                q.shape[0],  # all rows may be prompts': padded decodes have none
                scale,
                window,
                self._kv_scales,
                sinks,
            )
        return out
