"""The C interface of the kernel library, and the owners of pointers for it: packed weights and stacks of layers."""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from backend.kernels.integers import IntegerWeight, PackedIntegers
from backend.kernels.ops import DecoderLayer, DecoderStack, StepAdapters, StepInputs

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers by which `csrc/storage.h` knows the storage types."""

NO_WINDOW = 2**62

SIGNATURES: dict[str, tuple[type, ...]] = {
    # dtype, out, x, weight, rows, size, eps, threads
    "sluice_rms_norm": (c_int, *(c_void_p,) * 3, c_int64, c_int64, c_float, c_int),
    # dtype, out, x, residual, weight, rows, size, eps, threads
    "sluice_add_rms_norm": (c_int, *(c_void_p,) * 4, c_int64, c_int64, c_float, c_int),
    # dtype, out, gate_up, rows, size, gelu, threads
    "sluice_gate": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int, c_int),
    # dtype, q_out, qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, block_stride, head_stride, block_size,
    # positions, slot_mapping, tokens, num_heads, num_kv_heads, dim, threads
    "sluice_rope_and_store": (
        c_int,
        *(c_void_p,) * 5,
        c_float,
        c_void_p,
        c_void_p,
        *(c_int64,) * 3,
        c_void_p,
        c_void_p,
        *(c_int64,) * 4,
        c_int,
    ),
    # dtype, out, q, k_cache, v_cache, block_stride, head_stride, block_size, positions, query_start, context_lens,
    # block_tables, table_width, num_seqs, num_heads, num_kv_heads, dim, scale, window, sinks, threads
    "sluice_paged_attention": (
        c_int,
        *(c_void_p,) * 4,
        *(c_int64,) * 3,
        *(c_void_p,) * 4,
        *(c_int64,) * 5,
        c_float,
        c_int64,
        c_void_p,
        c_int,
    ),
    # logits, row_stride, bitmasks, words, indices, rows, vocab, threads
    "sluice_apply_token_bitmask": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int),
    # dtype, packed, weight, outputs, inputs, threads
    "sluice_pack_weight": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int),
    # dtype, out, x, linear, rows, threads
    "sluice_linear": (c_int, *(c_void_p,) * 3, c_int64, c_int),
    # dtype, out, x, rows, vectors, row_stride, memory, rank, part_outputs, num_parts, tokens, inputs, threads
    "sluice_adapt": (
        c_int,
        *(c_void_p,) * 4,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        *(c_int64,) * 3,
        c_int,
    ),
    # decoder, tokens
    "sluice_layers_scratch": (c_void_p, c_int64),
    # decoder, pool, step, out, residual, scratch, threads
    "sluice_layers": (*(c_void_p,) * 6, c_int),
    "sluice_linear_panel": (),
    "sluice_max_group": (),
    "sluice_max_head_dim": (),
    "sluice_head_dim_multiple": (),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of every function. Raises AttributeError when the library lacks one."""
    for name, argument_types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = None if argument_types else c_int
    library.sluice_layers_scratch.restype = c_int64
    return library


class _LinearStruct(Structure):
    """`PackedLinear` of kernels.h; each of these structures has a counterpart in csrc, and the same fields."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "factors", "steps", "bias", "next")),
        *((name, c_int64) for name in ("outputs", "inputs", "bits", "group", "groups_per_block", "num_factors")),
    )


class PackedLinear:
    """The product with a weight that is packed for the library, in its type or in integers."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor | list[IntegerWeight],
        bias: Tensor | None,
        inputs: int,
        dtype: torch.dtype,
    ) -> None:
        """Copy `weight` [out_features, inputs], which is of `dtype`, fp32 or bf16, or consists of integers of its
        outputs, which may be filled up beyond `inputs`.
        """
        self._multiply, self._code, self.dtype = library.sluice_linear, DTYPES[dtype], dtype
        self.outputs, self.inputs = sum(map(len, weight)) if isinstance(weight, list) else len(weight), inputs
        self._panel: int = library.sluice_linear_panel()
        self._kept: list[object] = []  # what the structures point to
        first = None
        if isinstance(weight, Tensor):
            packed = weight.new_empty((-(-self.outputs // self._panel) * self._panel, inputs))
            source, threads = weight.contiguous(), torch.get_num_threads()
            library.sluice_pack_weight(self._code, packed.data_ptr(), source.data_ptr(), *source.shape, threads)
            first = self._struct(self.outputs, bias, weight=packed)
        else:
            biases = [None] * len(weight) if bias is None else bias.split([*map(len, weight)])
            for part, own in reversed([*zip(weight, biases, strict=True)]):
                first = self._integers(part, own, first)
        assert first is not None, "it has outputs"
        self.address = ctypes.addressof(first)

    def _integers(self, part: IntegerWeight, bias: Tensor | None, following: _LinearStruct | None) -> _LinearStruct:
        packed = PackedIntegers.of(part, self._panel)
        made = self._struct(len(part), bias, weight=packed.weight, factors=packed.factors, steps=packed.steps)
        made.bits, made.group, made.groups_per_block, made.num_factors = part.form
        made.next = None if following is None else ctypes.addressof(following)
        return made

    def _struct(self, outputs: int, bias: Tensor | None, **tensors: Tensor | None) -> _LinearStruct:
        tensors["bias"] = None if bias is None else functional.pad(bias.float(), (0, -outputs % self._panel))
        made = _LinearStruct(
            outputs=outputs, inputs=self.inputs, **{name: pointer(one) for name, one in tensors.items()}
        )
        self._kept += [made, *tensors.values()]
        return made

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype == self.dtype
        rows = x.shape[0]
        out = x.new_empty((rows, self.outputs))
        self._multiply(self._code, out.data_ptr(), x.data_ptr(), self.address, rows, torch.get_num_threads())
        return out


class _LayerStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("attended_norm", "post_attention_norm", "fed_norm", "cos_sin")),
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_int64) for name in ("window", "group", "place")),
    )


class _StackStruct(Structure):
    _fields_ = (
        ("layers", POINTER(_LayerStruct)),
        ("final_norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "dim")),
        ("eps", c_float),
        ("scale", c_float),
        ("dtype", c_int),
        ("gelu", c_int),
    )


class _PoolStruct(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        *((name, c_int64) for name in ("block_stride", "layer_stride", "value_stride", "head_stride", "block_size")),
    )


PRODUCTS, _MAX_PARTS = 4, 3  # of a layer without experts, and the most of a product


class _AdaptersStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("rows", "vectors", "memory")),
        *((name, c_int64) for name in ("num_layers", "width", "rank")),
        ("first", c_int64 * PRODUCTS),
        ("num_parts", c_int64 * PRODUCTS),
        ("outputs", c_int64 * _MAX_PARTS * PRODUCTS),
    )

    @classmethod
    def of(cls, adapters: StepAdapters) -> Self:
        assert adapters.vectors.is_contiguous()
        products, parts = range(PRODUCTS), adapters.parts
        return cls(
            adapters.rows.data_ptr(),
            adapters.vectors.data_ptr(),
            adapters.memory.data_ptr(),
            *adapters.vectors.shape[1:],
            adapters.rank,
            (c_int64 * PRODUCTS)(*map(adapters.first, products)),
            (c_int64 * PRODUCTS)(*map(len, parts)),
            (c_int64 * _MAX_PARTS * PRODUCTS)(*((c_int64 * _MAX_PARTS)(*outputs) for outputs in parts)),
        )


class _TableStruct(Structure):
    _fields_ = (("slot_mapping", c_void_p), ("block_tables", c_void_p), ("table_width", c_int64))


class _StepStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("positions", "query_start", "context_lens")),
        *((name, c_int64) for name in ("tokens", "num_seqs")),
        ("tables", POINTER(_TableStruct)),
        ("adapters", POINTER(_AdaptersStruct)),
    )


class NativeLayers:
    """All layers of a decoder as one call of the library, for `Ops.fuse`. Each of its products is a `PackedLinear`."""

    def __init__(self, library: ctypes.CDLL, stack: DecoderStack) -> None:
        self._run, self._scratch_bytes = library.sluice_layers, library.sluice_layers_scratch
        self._stack = stack  # keeps the tensors that the structures point to
        self._layers = (_LayerStruct * len(stack.layers))(*map(_layer, stack.layers))
        self._decoder = _StackStruct(
            self._layers,
            stack.final_norm.data_ptr(),
            len(stack.layers),
            stack.final_norm.numel(),
            stack.num_heads,
            stack.num_kv_heads,
            stack.head_dim,
            stack.eps,
            stack.scale,
            DTYPES[stack.final_norm.dtype],
            stack.gelu,
        )
        self._of_decoder = byref(self._decoder)
        self._num_groups = 1 + max(layer.place[0] for layer in stack.layers)

    def __call__(self, residual: Tensor, step: StepInputs, blocks: Tensor) -> Tensor:
        assert residual.is_contiguous()
        assert blocks[0].is_contiguous()
        assert residual.dtype == blocks.dtype == self._stack.final_norm.dtype
        tokens = residual.shape[0]
        out = torch.empty_like(residual)
        scratch = torch.empty(self._scratch_bytes(self._of_decoder, tokens), dtype=torch.uint8)
        pool = _PoolStruct(blocks.data_ptr(), *blocks.stride()[:4], blocks.shape[4])
        groups = [step.of_group(group) for group in range(self._num_groups)]
        tables = [
            _TableStruct(one.slot_mapping.data_ptr(), one.block_tables.data_ptr(), one.block_tables.stride(0))
            for one in groups
        ]
        numbers = _StepStruct(
            step.positions.data_ptr(),
            step.query_start.data_ptr(),
            step.context_lens.data_ptr(),
            tokens,
            step.num_seqs,
            (_TableStruct * len(tables))(*tables),
            None if step.adapters is None else POINTER(_AdaptersStruct)(_AdaptersStruct.of(step.adapters)),
        )
        self._run(
            self._of_decoder,
            byref(pool),
            byref(numbers),
            out.data_ptr(),
            residual.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _layer(layer: DecoderLayer) -> _LayerStruct:
    norms = (layer.input_norm, layer.q_norm, layer.k_norm)
    others = (layer.attended_norm, layer.post_attention_norm, layer.fed_norm, layer.cos_sin)
    linears = [linear.address for linear in layer.linears if isinstance(linear, PackedLinear)]
    window = NO_WINDOW if layer.window is None else layer.window
    return _LayerStruct(*map(pointer, norms + others), *linears, window, *layer.place)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
