"""The operations on a CPU are C++; only products in bfloat16 are oneDNN's, if the processor multiplies in bfloat16."""

import ctypes
import importlib
import logging
import os
import shutil

import torch
from torch import Tensor

from backend.errors import ConfigError
from backend.kernels import build
from backend.kernels.experts import ExpertProducts
from backend.kernels.integers import ROUNDED_BITS, IntegerWeight, StoredWeight, Weight, rounded, unpacked
from backend.kernels.linear import MIN_TILED_OUTPUTS, TiledLinear, packs, widened
from backend.kernels.native import DTYPES, NO_WINDOW, PRODUCTS, NativeLayers, PackedLinear, declare, pointer
from backend.kernels.ops import DecoderStack, ExpertWeights, Linear, Ops, RotaryHeads, RunLayers, StepInputs
from backend.kernels.reference import ReferenceOps
from backend.kernels.self_check import batch_dependent, disagreements
from backend.kernels.torch_ops import TorchOps

log = logging.getLogger(__name__)

PACKING = ("int4", "int8", "fp8", "stored")  # kinds of quantization for which a GPU keeps products' weights packed
KINDS = ("auto", "native", "triton", "torch", "reference")


class CpuOps:
    """`Ops` by the library of `csrc`, for contiguous CPU tensors of the types in `native.DTYPES`.

    With `bits`, weights of products are rounded to integers of 4 or 8 bits. Of those and of stored integers, the
    product is that of the dequantised weights with inputs that are rounded to 16 bits of the largest of a group of 16
    or 32: each group's integers are multiplied and added exactly, its sum is scaled, and added to the last, in fp32.

    Raises AttributeError when the library lacks a function. Heads of a shape that its attention does not take (see
    `supports`) go to `TorchOps`.
    """

    captures = False
    sample = None

    def __init__(self, library: ctypes.CDLL, bits: int | None = None) -> None:
        self._library = declare(library)
        self._bits = bits
        self._rms_norm = library.sluice_rms_norm
        self._add_rms_norm = library.sluice_add_rms_norm
        self._gate = library.sluice_gate
        self._rope_and_store = library.sluice_rope_and_store
        self._paged_attention = library.sluice_paged_attention
        self._adapt = library.sluice_adapt
        self._apply_token_bitmask = library.sluice_apply_token_bitmask
        self._head_dim_multiple: int = library.sluice_head_dim_multiple()
        self._max_head_dim: int = library.sluice_max_head_dim()
        self._max_group: int = library.sluice_max_group()
        self._torch = TorchOps()
        self.batch_invariant = True

    def supports(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        """Return True if attention of this shape is C++: dimensions are whole SIMD registers, a group fits a tile."""
        fits = head_dim % self._head_dim_multiple == 0 and head_dim <= self._max_head_dim
        return dtype in DTYPES and fits and num_heads <= self._max_group * num_kv_heads

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        return self._product(weight, bias, self._bits)

    def experts(self, weights: ExpertWeights) -> Linear:
        """Experts are rounded to integers like other products; their router is not."""
        router = self._product(weights.router, weights.router_bias, None)
        return ExpertProducts.of(weights, router, self.linear, self.silu_mul)

    def _product(self, weight: Weight, bias: Tensor | None, bits: int | None) -> Linear:
        wide = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        packed: Tensor | list[IntegerWeight]
        if isinstance(weight, StoredWeight):
            packed = unpacked(weight)
        elif bits is not None:
            packed = [rounded(weight, bits)]
        elif (
            weight.dtype == torch.bfloat16
            and len(weight) >= MIN_TILED_OUTPUTS
            and build.multiplies_in_bfloat16()
            and packs(torch.bfloat16)
        ):
            product = TiledLinear(weight, bias)
            self.batch_invariant &= product.batch_invariant
            return product
        else:
            packed = weight.to(wide)
        linear = PackedLinear(self._library, packed, bias, weight.shape[1], wide)
        return linear if wide == weight.dtype else widened(linear)

    def fuse(self, stack: DecoderStack) -> RunLayers | None:
        layers = [[isinstance(linear, PackedLinear) for linear in layer.linears] for layer in stack.layers]
        packed = all(len(each) == PRODUCTS and all(each) for each in layers)
        packed = packed and all(layer.sinks is None for layer in stack.layers)  # it knows of none
        dtype = stack.final_norm.dtype
        if not packed or not self.supports(dtype, stack.num_heads, stack.num_kv_heads, stack.head_dim):
            return None
        return NativeLayers(self._library, stack)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous()
        assert weight.dtype == x.dtype
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._rms_norm(
            DTYPES[x.dtype],
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            x.numel() // size,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert weight.dtype == x.dtype == residual.dtype
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._add_rms_norm(
            DTYPES[x.dtype],
            out.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            x.numel() // size,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        assert gate_up.is_contiguous()
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._gate(
            DTYPES[gate_up.dtype], out.data_ptr(), gate_up.data_ptr(), rows, width // 2, gelu, torch.get_num_threads()
        )
        return out

    def rope_and_store(
        self, qkv: Tensor, rotation: RotaryHeads, k_cache: Tensor, v_cache: Tensor, step: StepInputs
    ) -> Tensor:
        tokens, head_dim = qkv.shape[0], k_cache.shape[3]
        if head_dim > self._max_head_dim:
            return self._torch.rope_and_store(qkv, rotation, k_cache, v_cache, step)
        assert qkv.is_contiguous()
        assert qkv.dtype == k_cache.dtype
        assert rotation.cos_sin.dtype == torch.float32
        out = qkv.new_empty((tokens, rotation.num_heads, head_dim))
        self._rope_and_store(
            DTYPES[qkv.dtype],
            out.data_ptr(),
            qkv.data_ptr(),
            rotation.cos_sin.data_ptr(),
            pointer(rotation.q_norm),
            pointer(rotation.k_norm),
            rotation.eps,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.shape[2],
            step.positions.data_ptr(),
            step.slot_mapping.data_ptr(),
            tokens,
            rotation.num_heads,
            rotation.num_kv_heads,
            head_dim,
            torch.get_num_threads(),
        )
        return out

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
        _, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
        if not self.supports(q.dtype, num_heads, num_kv_heads, head_dim):
            self.batch_invariant = False
            return self._torch.paged_attention(q, k_cache, v_cache, step, scale, window, sinks)
        assert q.is_contiguous()
        assert q.dtype == k_cache.dtype
        out = torch.empty_like(q)
        self._paged_attention(
            DTYPES[q.dtype],
            out.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
            k_cache.stride(1),
            block_size,
            step.positions.data_ptr(),
            step.query_start.data_ptr(),
            step.context_lens.data_ptr(),
            step.block_tables.data_ptr(),
            step.block_tables.stride(0),
            step.num_seqs,
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            NO_WINDOW if window is None else window,
            pointer(sinks),
            torch.get_num_threads(),
        )
        return out

    def adapt(self, out: Tensor, x: Tensor, step: StepInputs, layer: int, product: int) -> None:
        adapters = step.adapters
        assert adapters is not None
        assert out.is_contiguous()
        assert x.is_contiguous()
        assert out.dtype == x.dtype == adapters.memory.dtype
        parts = (ctypes.c_int64 * len(adapters.parts[product]))(*adapters.parts[product])
        self._adapt(
            DTYPES[x.dtype],
            out.data_ptr(),
            x.data_ptr(),
            adapters.rows.data_ptr(),
            adapters.vectors[0, layer, adapters.first(product) :].data_ptr(),
            adapters.vectors.stride(0),
            adapters.memory.data_ptr(),
            adapters.rank,
            ctypes.addressof(parts),
            len(parts),
            *x.shape,
            torch.get_num_threads(),
        )

    def apply_token_bitmask(self, logits: Tensor, bitmasks: Tensor, indices: Tensor) -> None:
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert bitmasks.is_contiguous()
        assert bitmasks.dtype == indices.dtype == torch.int32
        assert len(indices) == len(logits)
        self._apply_token_bitmask(
            logits.data_ptr(),
            logits.stride(0),
            bitmasks.data_ptr(),
            bitmasks.shape[1],
            indices.contiguous().data_ptr(),
            *logits.shape,
            torch.get_num_threads(),
        )


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kind: str = "auto",
    kv_dtype: torch.dtype | None = None,
    quantization: str = "auto",
) -> Ops:
    """Return the operations for `device` and `dtype`, chosen before the first step and never swapped. `kind` is one of:

    auto       on a CUDA device Triton's; on a CPU compiled kernels if they are in the cache (else they are built for
               the next start), or plain torch
    native     compiled kernels, compiling them now if need be; raises ConfigError when that fails
    triton     Triton's kernels; raises ConfigError without a CUDA device or the package
    torch      plain torch
    reference  the oracle, slow

    `kv_dtype`: that of cached keys and values, if it is another: compiled kernels of a CPU take none. `quantization` of
    `int4` or `int8` rounds the products' weights: compiled kernels of a CPU do, which `auto` compiles for it, and
    Triton's. These alone round them to `fp8`, and alone leave a GGUF file's integers only if it is `stored`.
    """
    if quantization in PACKING and device.type == "cuda":
        return _packing(device, dtype, kind, quantization)
    if quantization in ("fp8", "stored"):
        raise ConfigError(
            f"quantization {quantization} is of a GPU, and the device is {device.type}: choose int8 or int4, or auto, "
            "which keeps the integers of a GGUF file"
        )
    if (bits := ROUNDED_BITS.get(quantization)) is not None:
        return _quantizing(device, dtype, kind, kv_dtype, bits)
    if kind not in KINDS:
        raise ConfigError(f"kernels must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "reference":
        return ReferenceOps()
    if kind == "triton" or (kind == "auto" and device.type == "cuda"):
        return _triton(device)
    native = None
    if kind == "native" and kv_dtype not in (None, dtype):
        raise ConfigError("kernels native keep keys and values in the model's precision: choose kv_cache_dtype auto")
    if kind != "torch" and device.type == "cpu" and dtype in DTYPES and kv_dtype in (None, dtype):
        native = _native(dtype, wait=kind == "native")
    if native is None and kind == "native":
        raise ConfigError(f"no compiled kernels for {device.type} and {dtype}: the log above says why")
    return native or TorchOps()


def _packing(device: torch.device, dtype: torch.dtype, kind: str, quantization: str) -> Ops:
    if kind not in ("auto", "triton") or dtype.itemsize != 2:
        raise ConfigError(
            f"quantization {quantization} on a GPU is of Triton's kernels in 16 bits: choose kernels auto or triton, "
            f"and dtype bfloat16 or float16; got {kind}, {dtype}"
        )
    return _triton(device, quantization)


def _quantizing(device: torch.device, dtype: torch.dtype, kind: str, kv_dtype: torch.dtype | None, bits: int) -> Ops:
    if device.type != "cpu" or kind not in ("auto", "native") or dtype not in DTYPES or kv_dtype not in (None, dtype):
        raise ConfigError(
            f"quantization int{bits} on a CPU is of compiled kernels: choose kernels auto or native, dtype "
            f"float32, bfloat16 or float16, and kv_cache_dtype auto; got {device.type}, {kind}, {dtype}, {kv_dtype}"
        )
    native = _native(dtype, wait=True, bits=bits)
    if native is None:
        raise ConfigError(f"quantization int{bits} needs compiled kernels, and there are none: the log above says why")
    return native


def _triton(device: torch.device, quantization: str = "none") -> Ops:
    """Return Triton's operations, imported only when chosen: the package is not everywhere, and its import is slow."""
    if device.type != "cuda":
        raise ConfigError(f"kernels triton run on a CUDA device, not on {device.type}: choose auto or native")
    try:
        module = importlib.import_module("backend.kernels.triton_ops")
        ops: Ops = module.TritonOps(quantization=quantization, device=device)
    except ModuleNotFoundError as error:
        raise ConfigError(f"kernels triton need a package: {error}; install it, or choose torch") from error
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang", "cc") if name):
        raise ConfigError(
            "kernels triton need a C compiler, which builds what launches them, and there is none: install gcc, or "
            "name one in CC; kernels torch need none, and are slower"
        )
    return ops


def _native(dtype: torch.dtype, wait: bool, bits: int | None = None) -> CpuOps | None:
    library = build.load_library(wait)
    if library is None:
        return None
    try:
        plain, ops = CpuOps(library), CpuOps(library, bits)
    except AttributeError as error:
        log.error("the kernel library lacks a function, torch kernels serve instead: %s", error)
        return None
    wrong, varying = disagreements(plain, dtype), batch_dependent(ops, dtype)
    if wrong:
        log.error("compiled kernels disagree with the reference (%s), torch kernels serve instead", ", ".join(wrong))
        return None
    if varying:
        ops.batch_invariant = False
        log.warning("compiled kernels compute %s in an order that depends on the batch", ", ".join(varying))
    return ops
