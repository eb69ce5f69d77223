"""The C functions of `csrc`, with the types of their arguments. Calls release the GIL."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Storage types by the numbers of `csrc/storage.h`."""

NO_WINDOW = 2**62

SIGNATURES: dict[str, tuple[type, ...]] = {
    # dtype, out, x, weight, rows, size, eps, threads
    "sluice_rms_norm": (c_int, *(c_void_p,) * 3, c_int64, c_int64, c_float, c_int),
    # dtype, out, x, residual, weight, rows, size, eps, threads
    "sluice_add_rms_norm": (c_int, *(c_void_p,) * 4, c_int64, c_int64, c_float, c_int),
    # dtype, out, gate_up, rows, size, threads
    "sluice_silu_mul": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int),
    # dtype, q_out, qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, block_stride, head_stride, block_size,
    # positions, slot_mapping, tokens, num_heads, num_kv_heads, dim, threads
    "sluice_rope_and_store": (
        *(c_int, *(c_void_p,) * 5, c_float, c_void_p, c_void_p),
        *(*(c_int64,) * 3, c_void_p, c_void_p, *(c_int64,) * 4, c_int),
    ),
    # dtype, out, q, k_cache, v_cache, block_stride, head_stride, block_size, positions, query_start, context_lens,
    # block_tables, table_width, num_seqs, num_heads, num_kv_heads, dim, scale, window, threads
    "sluice_paged_attention": (
        *(c_int, *(c_void_p,) * 4, *(c_int64,) * 3, *(c_void_p,) * 4),
        *(*(c_int64,) * 5, c_float, c_int64, c_int),
    ),
    # dtype, packed, weight, outputs, inputs, threads
    "sluice_pack_weight": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int),
    # dtype, out, x, packed, bias, rows, outputs, inputs, threads
    "sluice_linear": (c_int, *(c_void_p,) * 4, *(c_int64,) * 3, c_int),
    "sluice_linear_panel": (),
    "sluice_max_group": (),
    "sluice_max_head_dim": (),
    "sluice_head_dim_multiple": (),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function its argument types. Raises AttributeError when the library lacks one."""
    for name, argument_types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = None if argument_types else c_int
    return library
