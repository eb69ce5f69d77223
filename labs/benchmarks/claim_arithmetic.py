"""The measurements of `claims` that take a formula or two: rooflines, memory, a pipeline, a replica's capacity."""

from collections.abc import Callable
from dataclasses import replace

from admission.step_times.step_time import StepWork
from backend.model.known_shapes import LLAMA_3_8B
from backend.parallel.shard import Shard
from backend.roofline import GPUS, MEMORY_BYTES, Footprint, MemoryPlan, Roofline
from gateway.cli.plan import step_time_of
from labs.benchmarks.claim_measures import Figures
from labs.benchmarks.overload_loads import DEVICE, drawn_trace
from labs.cli.capacity import planned_replica
from labs.simulation.recorder import Objective
from labs.simulation.search.replicas import replicas_for

LLAMA_3_70B = replace(
    LLAMA_3_8B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, intermediate_size=28672
)
REQUESTS_PER_SECOND, NODE_GPUS, RANKS = 500.0, 8, 4  # of the capacity that guides plan
STAGES, STAGE_ROWS, ROW_CONTEXT, ROUNDS = 4, 64, 512, 50  # of a pipeline


def decodes_of_prefill(*_: object) -> Figures:
    """The time of a prompt of 4,096 tokens, in steps of one decode."""
    decode = DEVICE.seconds(StepWork(decode_tokens=1, decode_context=512))
    return {
        "steps of one decode": sum(DEVICE.seconds(StepWork(512, 0, 0, at, 512 * at)) for at in range(0, 4096, 512))
        / decode
    }


def swapping(*_: object) -> Figures:
    return {"ms at 25 GB/s, what a PCIe 4 link of 16 lanes copies": 1000 / 25}


def large_kv(*_: object) -> Figures:
    """Keys and values of Llama-3-70B: 80 layers with 8 heads of 128 numbers in 16 bits."""
    token = Footprint(LLAMA_3_70B, "bfloat16").kv_bytes_per_token
    return {
        "GB for a sequence of 8,192 tokens": 8192 * token / 1e9,
        "GB for 1,024 tokens": 1024 * token / 1e9,
        "s at 100 Gb/s": 1024 * token * 8 / 100e9,
    }


def efficiency(*_: object) -> Figures:
    """Of the roofline of Llama-3-8B on an H100, contexts of 1,024 tokens."""
    roofline = Roofline(Footprint(LLAMA_3_8B, "bfloat16"), GPUS["h100"])
    flops = 2 * roofline.footprint.num_multiplied
    shares = {
        f"% of its arithmetic by a batch of {batch}": batch * flops / roofline.decode(batch, 1024) / roofline.rate
        for batch in (1, 32, 256)
    }
    return {**shares, "rows is the ridge, without contexts": roofline.ridge}


def nodes(seed: int, share: float) -> Figures:
    """Llama-3-70B on four H100 a replica, as docs/simulation.md plans it: a first token within 1 s for 99 of 100."""
    footprint = Footprint(Shard.of(LLAMA_3_70B, 0, RANKS).stored(LLAMA_3_70B), "bfloat16")
    memory = MemoryPlan.make(footprint, MEMORY_BYTES["h100"], 8192, 256, 2048)
    steps = step_time_of(Roofline(footprint, GPUS["h100"], RANKS))
    requests, objective = max(50, round(1000 * share)), Objective(1.0, 0.1)
    replica = planned_replica(drawn_trace(seed, 5000), memory, steps, objective, requests)
    knee = replica.knee(lambda _: None)
    rate = knee.rate if knee else 1e-9
    return {
        "nodes of eight H100": replicas_for(REQUESTS_PER_SECOND, rate) * RANKS / NODE_GPUS,
        "requests/s a replica": rate,
    }


def microbatches(*_: object) -> Figures:
    """64 rows in a pipeline of four stages with a quarter of a step's time each: in one batch, and in four."""
    kinds: dict[str, Callable[[int], StepWork]] = {
        "decodes": lambda rows: StepWork(0, rows, rows * ROW_CONTEXT),
        "prompts of 512": lambda rows: StepWork(512 * rows, 0, 0),
    }
    figures = Figures()
    for name, work in kinds.items():
        one, four = (_pipelined(groups, DEVICE.seconds(work(STAGE_ROWS // groups)) / STAGES) for groups in (1, STAGES))
        figures[f"% of the stages' time filled, {name}"] = four[1]
        figures[f"x the rows of one batch, {name}"] = four[0] / one[0]
    return figures


def _pipelined(groups: int, seconds: float) -> tuple[float, float]:
    """Returns the rows a second of `groups` that go through all stages, `seconds` each, round after round; and the
    share of the stages' time that they fill.
    """
    stage_free, group_free = [0.0] * STAGES, [0.0] * groups
    for group in list(range(groups)) * ROUNDS:
        for stage in range(STAGES):
            group_free[group] = stage_free[stage] = max(stage_free[stage], group_free[group]) + seconds
    return STAGE_ROWS * ROUNDS / max(group_free), ROUNDS * groups * seconds / max(group_free)
