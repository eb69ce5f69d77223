"""Every kernel against its reference, on the device: attention and stores by shape, sampling by token."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from backend.kernels import few_rows, reference
from backend.kernels.ops import RotaryHeads, RowPenalties, RowSampling
from backend.kernels.reference import ReferenceOps
from backend.kernels.self_check import TOLERANCE, disagreements
from backend.kernels.triton_ops import TritonOps
from backend.worker.penalties import Penalties, PenaltyState
from backend.worker.sampler import SamplingBatch, sample, uniforms
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.kernels_gpu import BLOCK_SIZE, Workload, step_of

WORKLOADS = (Workload(5, 1, 333), Workload(3, 77, 200))
BEYOND_32_BITS = 150_000  # blocks of 2 * 8 * 16 * 128 numbers: more than 2**31
FAR_BLOCKS = 20
NEAR_TIE_MASS = 1e-5  # of the mass that is drawn from


def check(device: torch.device) -> Iterator[Finding]:
    for what, judge in comparisons(device, gpu=device.type == "cuda").items():
        wrong = judge()
        names = f": {', '.join(wrong)}" if isinstance(wrong, list) and wrong else ""
        number = len(wrong) if isinstance(wrong, list) else wrong
        yield Finding(f"{what}{names}", number, bound=0, exact=True)


def comparisons(device: torch.device, gpu: bool) -> dict[str, Callable[[], list[str] | int]]:
    """The comparisons for a GPU, or for an interpreter's patience; each returns its differences."""
    found: dict[str, Callable[[], list[str] | int]] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if gpu else (torch.float32,):
        what = f"kernels that differ from their reference, {_name(dtype)}"
        found[what] = partial(disagreements, TritonOps(), dtype, device)
        found[f"products of few rows, {_name(dtype)}"] = partial(_few_rows, dtype, device)
    for head_dim in (64, 80, 128, 256) if gpu else (32,):
        found[f"attention and stores of heads of {head_dim}, fp32"] = partial(_attention, device, head_dim, gpu)
    if gpu:
        found["attention past 2**31 elements, bf16"] = partial(_far, device)
    for vocab in (1000, 151_936) if gpu else (300,):
        found[f"tokens that differ from torch's, vocabulary {vocab:,}"] = partial(_sampling, device, vocab)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few_rows(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of the products of 3 and 16 rows that differ: plain, with what SiLU gates, and added to a residual."""
    found = list[str]()
    for rows, bias in product((3, few_rows.MAX_ROWS), (None, torch.randn(1024, device=device).to(dtype))):
        x, weight = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, 896), (1024, 896)))
        linear = few_rows.Product(weight / 30, bias)
        plain = linear(x)
        residual = torch.randn_like(plain)
        added = residual + plain
        pairs = {
            "plain": (plain, few_rows.multiply(torch.empty_like(plain), x, linear)),
            "gated": (reference.silu_mul(plain), few_rows.multiply(x.new_empty((rows, 512)), x, linear, gates=True)),
            "added": (added, few_rows.multiply(residual, x, linear, adds=True)),
        }
        near = TOLERANCE[dtype]
        found += [f"{name}, {rows}" for name, (a, b) in pairs.items() if not torch.allclose(a, b, near, near)]
    return found


def _attention(device: torch.device, head_dim: int, gpu: bool) -> list[str]:
    """Names of the workloads for which a result differs."""
    workloads = WORKLOADS if gpu else (Workload(3, 1, 40), Workload(2, 7, 20))
    return [
        f"{workload.tokens} at {workload.context}, window {window}"
        for workload, window in product(workloads, (None, 19))
        if not _agrees(_pool(workload, head_dim, device), workload, window)
    ]


def _pool(workload: Workload, head_dim: int, device: torch.device) -> Tensor:
    blocks = workload.sequences * -(-workload.context // BLOCK_SIZE)
    return torch.randn((blocks, 2, 2, 2, BLOCK_SIZE, head_dim), device=device)


def _far(device: torch.device) -> list[str]:
    blocks = BEYOND_32_BITS if device.type == "cuda" else FAR_BLOCKS
    pool = torch.zeros((blocks, 1, 2, 8, BLOCK_SIZE, 128), dtype=torch.bfloat16, device=device)
    pool[-FAR_BLOCKS:] = torch.randn_like(pool[-FAR_BLOCKS:])
    return [] if _agrees(pool, Workload(2, 3, 70), None) else ["the last blocks of the pool"]


def _agrees(pool: Tensor, workload: Workload, window: int | None) -> bool:
    """Storing and attending in the last layer of `pool`, in the last of its blocks."""
    device, dtype, kv_heads, head_dim = pool.device, pool.dtype, pool.shape[3], pool.shape[5]
    heads = 3 * kv_heads
    step = step_of(workload, device)
    used = step.block_tables.numel()
    step.block_tables.add_(len(pool) - used)
    step.slot_mapping.add_((len(pool) - used) * BLOCK_SIZE)
    rows = workload.sequences * workload.tokens
    qkv = torch.randn((rows, (heads + 2 * kv_heads) * head_dim), dtype=dtype, device=device)
    angles = torch.randn((workload.context, head_dim), device=device)
    rotation = RotaryHeads(heads, kv_heads, angles, None, None, 1e-5)
    before, results = pool[-used:].clone(), []
    for ops in (ReferenceOps(), TritonOps()):
        pool[-used:] = before
        k, v = pool[:, -1, 0], pool[:, -1, 1]
        q = ops.rope_and_store(qkv, rotation, k, v, step)
        attended = ops.paged_attention(q, k, v, step, head_dim**-0.5, window)
        results.append(torch.cat((q.flatten(), attended.flatten(), pool[-used:].flatten())).float())
    return torch.allclose(*results, TOLERANCE[dtype], TOLERANCE[dtype])


def _sampling(device: torch.device, vocab: int) -> int:
    """The number of wrong tokens: neither torch's with the same seeds, nor within `NEAR_TIE_MASS` of them.

    A GPU rounds weights in its own way, so near the boundary of two tokens either is right.
    """
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.2, 0, 0.9, 0.0), (0.9, 50, 0.8, 0.02)]
    kinds += [(1.0, vocab // 3, 1.0, 0.0), (2.0, vocab, 0.99, 0.0), (1.0, 150, 0.95, 1e-3)]
    rows = kinds * 4
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    logits = 3 * torch.randn((len(rows), vocab), generator=torch.Generator().manual_seed(0))
    logits[::4] -= 20  # below 0, where a penalty multiplies
    logits[len(kinds) : 2 * len(kinds)] = 0.5  # flat
    logits[2 * len(kinds) : 3 * len(kinds)] = logits[: len(kinds)].round()  # tied
    seeds = torch.arange(len(rows)) + 2**40
    positions = torch.arange(len(rows)) * 7
    on_device = RowSampling(
        torch.tensor(temperature).to(device),
        torch.tensor(min_p).to(device),
        torch.tensor(top_k, dtype=torch.int32).to(device),
        torch.tensor(top_p).to(device),
        seeds.to(device),
        positions.to(device),
    )

    def drawn(nudge: float) -> Tensor:
        numbers = torch.from_numpy(uniforms(seeds.numpy(), positions.numpy())) + nudge
        in_torch = SamplingBatch(
            temperature=torch.tensor(temperature),
            uniforms=numbers.clamp(0, 1 - 2**-53),
            min_p=torch.tensor(min_p),
            top_k=torch.tensor(top_k),
            top_p=torch.tensor(top_p, dtype=torch.float64),
            penalties=_penalties(len(rows), vocab),
        )
        return sample(logits.clone(), in_torch)

    penalties = _on_device(_penalties(len(rows), vocab), device)
    found = TritonOps().sample(logits.to(device, copy=True), on_device, penalties).cpu()
    return int(((found < drawn(-NEAR_TIE_MASS)) | (found > drawn(NEAR_TIE_MASS))).sum())


def _penalties(rows: int, vocab: int) -> Penalties:
    """Every other row of a batch is penalised, in a slot of its own, for tokens it holds in prompt and output."""
    generator = torch.Generator().manual_seed(1)
    state, chosen = PenaltyState(rows, vocab), torch.arange(0, rows, 2)
    state.occurrences.in_prompt.copy_(torch.rand((rows, vocab), generator=generator) < 0.1)
    state.occurrences.output_counts.random_(0, 3, generator=generator)
    presence, frequency = 2 * torch.rand((2, len(chosen), 1), generator=generator)
    return Penalties(state, [], chosen, chosen.flip(0), presence, frequency, 1 + presence)


def _on_device(penalties: Penalties, device: torch.device) -> RowPenalties:
    """The same for all rows, of which the others are in the slots that are left and have none."""
    held = penalties.state.occurrences
    slots = torch.arange(len(held.in_prompt))
    slots[penalties.rows] = penalties.slots
    strengths = ((penalties.presence, 0.0), (penalties.frequency, 0.0), (penalties.repetition, 1.0))
    presence, frequency, repetition = (_spread(*strength, penalties.rows, len(slots)) for strength in strengths)
    return RowPenalties(
        *(x.to(device) for x in (slots, presence, frequency, repetition, held.in_prompt, held.output_counts.clone()))
    )


def _spread(strengths: Tensor | None, off: float, rows: Tensor, count: int) -> Tensor:
    assert strengths is not None
    return torch.full((count,), off).index_copy(0, rows, strengths.squeeze(1))
