#!/usr/bin/env python3
"""Compile every Triton kernel ahead of time, on any machine, and fail if one is not what a GPU should get.

    scripts/compile_kernels.py                                  with the Triton of this interpreter
    PYTHONPATH=/path/to/triton-3.6 scripts/compile_kernels.py   with one unpacked elsewhere
    scripts/compile_kernels.py --arch 90 --head-dim 128 --dtype bfloat16 --block-size 16 --kernel prefill

    scripts/compile_kernels.py --cache /tmp/kernels --arch 90   all that scripts/check_gpu.py launches on an H100

The kernels' own launchers are run on tensors without memory, and what they would launch is compiled instead, so that
what is compiled here is what a GPU gets: same constants, same warps and stages, same knowledge of alignment. A cache
serves a GPU's machine (TRITON_CACHE_DIR) at the absolute path where it was made, with the same version of Triton.

No kernel may spill, or take more shared memory than the architecture gives a program. Attention in 16 and 8 bits must
multiply with the architecture's tensor-core instructions, copy keys and values 16 bytes at a time (8 from an 8-bit
cache), and have copies in flight from one iteration of its loops to the next; so must products with packed weights, but
for the width of copies.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported

import torch
import triton
from torch import Tensor

from backend.bound_process import bound
from backend.kernels import few_rows, sampling, triton_lang
from backend.kernels.integers import rounded
from backend.kernels.ops import ExpertWeights, RotaryHeads, StepAdapters, StepInputs
from backend.kernels.packed_product import PackedProduct, PackedWeight
from backend.kernels.triton_ops import TritonOps
from labs.benchmarks.gpu_check import compiling
from labs.benchmarks.gpu_check.paper_gpu import META, compiled, paper_gpu
from labs.process_pool import process_pool

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}
ATTENTION = ("prefill", "decode")
PACKED = "packed_product"
PRODUCTS = {9: "wgmma.mma_async", 10: "tcgen05.mma"}  # of many rows, by the architecture's major number
LAUNCH_FLAGS = ("PDL", "launch_pdl")  # where an architecture has it
FIRST_ARCH_FILLED_BY_PROGRAMS = 90  # from here on, decodes keep copies in flight by more programs, not by more stages
BLOCK_ID_BYTES = 4  # copied by a decode beside keys and values


@dataclass(frozen=True)
class Variant:
    """One way to launch the kernels: `dtype` "fp8" is bf16 over an e4m3 cache."""

    arch: int
    dtype: str
    head_dim: int
    block_size: int
    group: int = 4

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.dtype:8} head {self.head_dim:3} block {self.block_size:2} group {self.group}"


@dataclass(frozen=True)
class Compiled:
    variant: Variant
    kernel: str
    registers: int
    shared: int  # bytes, static and dynamic
    spilled: int  # bytes of local memory and stack
    in_flight: int  # copies still in flight where the loops wait for others, the fewest; 0 for a loop without copies
    faults: tuple[str, ...]


def step() -> StepInputs:
    """64 decodes and 3 prompts: nothing here has contents, so only the host numbers matter."""
    tokens, sequences = 1088, 67

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return StepInputs(
        token_ids=meta(tokens, dtype=torch.int64),
        positions=meta(tokens, dtype=torch.int64),
        slot_mapping=meta(tokens, dtype=torch.int64),
        query_start=meta(sequences + 1),
        context_lens=meta(sequences),
        block_tables=meta(sequences, 512),
        num_seqs=sequences,
        max_query_len=1024,
        max_context_len=8192,
        num_decodes=64,
    )


def run_launchers(variant: Variant) -> None:
    """Call every launcher as a decoder does, with Llama-like widths."""
    ops, inputs = TritonOps(), step()
    dtype, head_dim = DTYPES[variant.dtype], variant.head_dim
    kv_heads, tokens = 8, inputs.positions.numel()
    heads = kv_heads * variant.group
    cache_type = torch.float8_e4m3fn if variant.dtype == "fp8" else dtype
    pool = torch.empty((1024, 32, 2, kv_heads, variant.block_size, head_dim), dtype=cache_type, device=META)
    caches = (pool[:, 1, 0], pool[:, 1, 1])

    def rows(width: int) -> Tensor:
        return torch.empty((tokens, width), dtype=dtype, device=META)

    norm, hidden = torch.empty(head_dim, dtype=dtype, device=META), rows(4096)
    cos_sin = torch.empty((8192, head_dim), device=META)
    qkv = rows((heads + 2 * kv_heads) * head_dim)
    for norms in ((None, None), (norm, norm)):
        query = ops.rope_and_store(qkv, RotaryHeads(heads, kv_heads, cos_sin, *norms, 1e-5), *caches, inputs)
    for window in (None, 4096):
        ops.paged_attention(query, *caches, inputs, head_dim**-0.5, window)
    if head_dim == 64:  # gpt-oss'
        ops.paged_attention(query, *caches, inputs, 0.125, 128, torch.empty(heads, device=META))
    if variant.dtype == "fp8" or variant.block_size != 16 or head_dim != 128:
        return  # the rest knows nothing of heads
    ops.rms_norm(hidden, hidden[0], 1e-5)
    ops.add_rms_norm(hidden, hidden, hidden[0], 1e-5)
    ops.silu_mul(rows(2 * 14336))
    run_products(dtype)
    if variant.dtype != "float32":
        run_packed_products(dtype)
    run_adapters(inputs, dtype)
    run_experts(dtype)
    if variant.dtype == "bfloat16":
        run_sampling()


def run_products(dtype: torch.dtype) -> None:
    """Run the products of few rows: plain, gated and added to a residual."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    for hidden in (1024, 4096):
        x, product = meta(few_rows.MAX_ROWS, hidden), few_rows.Product(meta(6 * hidden, hidden), None)
        few_rows.multiply(meta(few_rows.MAX_ROWS, 6 * hidden), x, product)
        few_rows.multiply(meta(few_rows.MAX_ROWS, 3 * hidden), x, product, gates=True)
        few_rows.multiply(x, x, few_rows.Product(meta(hidden, hidden), meta(hidden)), adds=True)


def run_packed_products(dtype: torch.dtype) -> None:
    """Run products with weights of each form, by tiles of every height."""
    draw = torch.empty((4096, 4096), dtype=dtype, device=META)
    weights = [PackedWeight.of_integers(rounded(draw, bits)) for bits in (4, 8)] + [PackedWeight.rounded_to_e4m3(draw)]
    weights.append(replace(weights[1], group=16, scales=weights[1].scales.repeat(1, 1, 2)))  # GGUF's Q6_K
    for weight in weights:
        for rows in (16, 32, 64, 1024):
            PackedProduct((weight,), draw[0])(torch.empty((rows, 4096), dtype=dtype, device=META))


def run_adapters(inputs: StepInputs, dtype: torch.dtype) -> None:
    """Run the products of adapters of rank 64 and 16, for decodes alone and beside prompts."""

    def meta(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=META)

    tokens, parts = inputs.positions.numel(), ((4096, 1024, 1024), (4096,), (14336, 14336), (4096,))
    for rank in (64, 16):
        vectors = meta(256, 32, 14 * rank, of=torch.int64)
        adapters = StepAdapters(meta(tokens, of=torch.int32), vectors, meta(1 << 30), rank, parts)
        for longest in (1, 1024):
            adapted = replace(inputs, adapters=adapters, max_query_len=longest)
            TritonOps().adapt(meta(tokens, 6144), meta(tokens, 4096), adapted, 1, 0)
            TritonOps().adapt(meta(tokens, 4096), meta(tokens, 14336), adapted, 1, 3)


def run_experts(dtype: torch.dtype) -> None:
    """Run 128 experts, of which each token has 8, for few tokens and many, and gpt-oss'."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    weights = ExpertWeights(meta(128, 2048), meta(128, 1536, 2048), meta(128, 2048, 768), 8, True)
    biases = {"router_bias": meta(128), "gate_up_bias": meta(128, 1536), "down_bias": meta(128, 2048)}
    for tokens in (2048, 16):
        TritonOps().experts(weights)(meta(tokens, 2048))
        TritonOps().experts(replace(weights, clamp=(1.7, 7.0), **biases))(meta(tokens, 2048))


def run_sampling() -> None:
    """Logits are fp32 for every model."""
    rows, vocab = 64, 128_256

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    seeds = meta(rows, dtype=torch.int64)
    parameters = sampling.RowSampling(
        temperature=meta(rows),
        min_p=meta(rows),
        top_k=meta(rows, dtype=torch.int32),
        top_p=meta(rows),
        seeds=seeds,
        positions=seeds,
    )
    penalties = sampling.RowPenalties(
        slots=seeds,
        presence=meta(rows),
        frequency=meta(rows),
        repetition=meta(rows),
        in_prompt=meta(256, vocab, dtype=torch.bool),
        output_counts=meta(256, vocab, dtype=torch.int32),
    )
    sampling.sample_rows(meta(rows, vocab), parameters)
    words = -(-vocab // 32)
    indices = meta(rows, dtype=torch.int32)
    TritonOps().apply_token_bitmask(meta(rows, vocab), meta(256, words, dtype=torch.int32), indices)
    sampling.sample_rows(meta(rows, vocab), parameters, penalties)


def compile_variant(variant: Variant, kernels: tuple[str, ...] = ()) -> list[Compiled]:
    """Compile the variant's kernels, or only `kernels`, by their printed names."""
    results: dict[str, Compiled] = {}

    def on_launch(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        label = kernel.__name__.strip("_") + told_apart_by(constants)
        if label not in results and (not kernels or label in kernels):
            results[label] = inspect(variant, label, compiled(kernel, args, constants))

    with paper_gpu(variant.arch, on_launch):
        run_launchers(variant)
    return list(results.values())


def told_apart_by(constants: Mapping[str, Any]) -> str:
    """The names of the set constants; of packed products the bits, the inputs of a scale and the rows of a tile."""
    if "BITS" in constants:
        return f" {constants['BITS']}/{constants['GROUP']} x {constants['BLOCK_M']}"
    on = [name.lower() for name, value in constants.items() if value is True and name not in LAUNCH_FLAGS]
    return "".join(f" {name}" for name in on)


def inspect(variant: Variant, label: str, built: Any) -> Compiled:
    """Registers and local memory, as the CUDA tools in Triton's wheel read them from the machine code; and faults."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = bound([tool, "--dump-resource-usage", file.name])
        text = subprocess.run(**command, check=True, capture_output=True, text=True)
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)}
    spilled, shared, in_flight = found["STACK"] + found["LOCAL"], built.metadata.shared, copies_in_flight(built.asm)
    limit = triton_lang.shared_memory(divmod(variant.arch, 10))
    faults = [f"spills {spilled} bytes"] if spilled else []
    if shared > limit:
        faults.append(f"takes {shared} bytes of shared memory, where a program has {limit}")
    if label.startswith(ATTENTION) and variant.dtype != "float32":
        faults += attention_faults(variant, label, built.asm["ptx"], in_flight)
    if label.startswith(PACKED):
        faults += packed_faults(variant, label, built.asm["ptx"], in_flight)
    return Compiled(variant, label, found["REG"], shared, spilled, in_flight, tuple(faults))


def copies_in_flight(code: Mapping[str, str]) -> int:
    """The fewest copies that a loop with copies leaves in flight where it waits for others."""
    depth, least = [], []
    for line in code["ttgir"].splitlines():
        indent = len(line) - len(line.lstrip())
        if " scf.for " in line:
            depth.append(indent)
        elif depth and line.strip().startswith("}") and indent == depth[-1]:
            depth.pop()
        elif depth and (wait := re.search(r"async_wait.*num = (\d+)", line)):
            least.append(int(wait[1]))
    return min(least, default=0)


def attention_faults(variant: Variant, label: str, ptx: str, in_flight: int) -> Iterator[str]:
    prefill = label.startswith("prefill")
    instruction = PRODUCTS.get(variant.arch // 10, "mma.sync") if prefill else "mma.sync"
    if instruction not in ptx:
        yield f"does not multiply with {instruction}"
    widths = {int(width, 0) for width in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (\w+)", ptx)}
    narrow = {width for width in widths if width < (8 if variant.dtype == "fp8" else 16)}
    if not prefill:
        narrow.discard(BLOCK_ID_BYTES)
    if narrow or not widths:
        yield f"copies {sorted(widths)} bytes at a time"
    if not in_flight and (prefill or variant.arch < FIRST_ARCH_FILLED_BY_PROGRAMS or variant.dtype == "fp8"):
        yield "waits for copies where it begins them"


def packed_faults(variant: Variant, label: str, ptx: str, in_flight: int) -> Iterator[str]:
    """Yield the faults of a packed product; the tile of 16 rows has too few outputs for Hopper's instruction."""
    instruction = "mma.sync" if label.endswith("x 16") else PRODUCTS.get(variant.arch // 10, "mma.sync")
    if instruction not in ptx:
        yield f"does not multiply with {instruction}"
    if not in_flight:
        yield "waits for copies where it begins them"


def variants(options: argparse.Namespace) -> Iterator[Variant]:
    for arch in options.arch:
        for dtype in options.dtype:
            for head_dim in options.head_dim:
                for block_size in options.block_size:
                    for group in options.group:
                        yield Variant(arch, dtype, head_dim, block_size, group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, default=[80, 86, 89, 90, 100, 120])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 80, 96, 128, 256])
    parser.add_argument("--block-size", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--group", nargs="+", type=int, default=[4], help="query heads that share a key head")
    parser.add_argument("--kernel", nargs="+", default=[], help="as printed, 'prefill windowed' (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--cache", type=Path, metavar="DIRECTORY", help="fill this cache of Triton's instead, see above"
    )
    options = parser.parse_args()
    if options.cache is not None:
        return fill(options.cache.resolve(), options.arch, options.jobs)
    faults = 0
    print(f"triton {triton.__version__}\n{'':52}{'kernel':28}{'registers':>10}{'shared':>8}{'in flight':>10}")
    for found in compile_all(list(variants(options)), tuple(options.kernel), options.jobs):
        line = f"{found.variant!s:52}{found.kernel:28}{found.registers:10}{found.shared:8}{found.in_flight:10}"
        print(line, *found.faults, sep="  ", flush=True)
        faults += len(found.faults)
    print(f"{faults} faults" if faults else "no kernel has a fault")
    return 1 if faults else 0


def fill(cache: Path, archs: list[int], jobs: int) -> int:
    """Compile all launches of `scripts/check_gpu.py`, for a GPU of each architecture."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    return max([compiling.main([f"--arch={arch}", f"--jobs={jobs}"]) for arch in archs])


def compile_all(wanted: list[Variant], kernels: tuple[str, ...], jobs: int) -> Iterator[Compiled]:
    """In processes for each architecture: how e4m3 is converted, Triton decides once in a process, by its first."""
    for _, variants_of_one in groupby(wanted, attrgetter("arch")):
        with process_pool(jobs, get_context("spawn")) as pool:
            for results in pool.map(partial(compile_variant, kernels=kernels), variants_of_one):
                yield from results


if __name__ == "__main__":
    sys.exit(main())
