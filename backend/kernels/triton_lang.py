"""Shared parts of the Triton kernels: products, 8-bit floats, the search of a ragged batch, and facts of the device.

Importing this module imports Triton, so nothing outside the Triton kernels does.
"""

import functools
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 asks for the choice; 3.10 would not fuse

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
if INTERPRETED.value:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_index(tensor, scope):
        """Triton 3.6 interprets a scalar as an array of one, which numpy 2.4 does not convert to a number."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_index

LOG2E = 1.4426950408889634
NO_WINDOW = 2**31 - 1

SCAN = tl.constexpr(256)
"""The sequences whose counts one step of `advance` adds up."""

FP8 = torch.float8_e4m3fn
CPU_MULTIPROCESSORS = 4
CPU_CAPABILITY = (8, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of `device`; a few for a CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return CPU_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability; for a CPU, where kernels are interpreted, the oldest that is supported."""
    return CPU_CAPABILITY if device.type == "cpu" else torch.cuda.get_device_capability(device)


def shared_memory(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that one program may have on a device of this compute capability."""
    if compute_capability in ((8, 0), (8, 7)):
        return 163 * 1024
    return (227 if (9, 0) <= compute_capability < (12, 0) else 99) * 1024


def kernel_view(cache: Tensor) -> Tensor:
    """Return `cache` as a kernel takes it: e4m3 as bytes if the device cannot convert it (before sm_89)."""
    if cache.dtype == FP8 and capability(cache.device) < (8, 9):
        return cache.view(torch.uint8)
    return cache


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the arguments that launch a kernel while the kernel before it still runs, on devices that can (sm_90 on):
    programmatic dependent launch. The launched kernel calls `await_inputs` before it reads the results of others.
    """
    has = not INTERPRETED.value and capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if has else {"PDL": False}


@triton.jit
def await_inputs(PDL: tl.constexpr):  # noqa: N803
    """Let the next kernel be launched, and wait until all kernels before this one have ended: their results are there.

    Every program calls this before it returns, because the next kernel waits for this one alone. Results from before
    the last product of matrices, which is launched as usual, may be read earlier.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def dot(a, b, acc):
    """Return `acc + a @ b` in fp32; fp32 operands as three tf32 products, or plainly if three would spill.

    Triton's interpreter computes bf16 products wrongly, so there operands are widened.
    """
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.shape[1] > 128:
        result = tl.dot(a, b, acc, input_precision="ieee")
    else:
        result = tl.dot(a, b, acc, input_precision="tf32x3")
    return result


@triton.jit
def gated(gate, up, GELU: tl.constexpr = False):  # noqa: N803
    """Return SiLU(gate) * up, or GELU by tanh, rounded to their type after the activation, as the reference rounds."""
    wide = gate.to(tl.float32)
    slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide) if GELU else wide  # 2 sqrt(2 / pi)
    activated = (wide / (1 + tl.exp(-slope))).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def begun(sinks, heads, counts, SINKS: tl.constexpr):  # noqa: N803
    """Return the largest score in base 2 and the sum of weights before any key, for rows of these query heads: the
    sink's if it `counts`, else none.
    """
    largest = tl.full([heads.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([heads.shape[0]], tl.float32)
    if SINKS:
        largest = tl.where(counts, tl.load(sinks + heads) * 1.4426950408889634, largest)  # log2(e)
        total = tl.where(counts, 1.0, total)
    return largest, total


@triton.jit
def from_cache(x, dtype: tl.constexpr):
    """Return cached numbers as `dtype`. Bytes are e4m3: in the fields of an fp16 they lack only the exponent's bias."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        result = (half * 256.0).to(dtype)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def to_cache(x, inverse_scale, dtype: tl.constexpr):
    """Return fp32 numbers as the cache stores them: rounded to nearest even, e4m3 saturating at 448 after scaling."""
    if dtype == tl.uint8:
        x = tl.clamp(x * inverse_scale, -448.0, 448.0)
        bits = (tl.abs(x) * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2**-120 aligns the exponents
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        result = (bits | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    elif dtype == tl.float8e4nv:
        result = tl.clamp(x * inverse_scale, -448.0, 448.0).to(dtype)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def advance(item, sequences, counts, num_seqs, found, first, before):
    """Take one step of the search for the sequence that owns work item `item`, when sequence s owns `counts[s]` items.

    Returns the number of sequences found so far that end at or before `item`, the end of the last of them, and all
    items so far.
    """
    ends = before + tl.cumsum(counts, 0)
    passed = (ends <= item) & (sequences < num_seqs)
    found += tl.sum(passed.to(tl.int32), 0)
    first = tl.maximum(first, tl.max(tl.where(passed, ends, 0), 0))
    return found, first, before + tl.sum(counts, 0)
