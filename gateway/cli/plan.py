"""`sluice plan`: a model's use of a GPU's memory, the number of sequences that fit, and the least time of its steps.

From the model's config.json: no GPU, and of the weights at most what their files say of themselves."""

import json
from argparse import Namespace, _SubParsersAction
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from admission.step_times.step_time import StepTime
from backend.errors import ConfigError
from backend.extensions import extensions
from backend.model.hub import resolve_config
from backend.model.model_config import ModelConfig, read_model_config
from backend.parallel.shard import Shard
from backend.roofline import (
    BLOCK_SIZE,
    GPUS,
    ITEM_BYTES,
    MEMORY_BYTES,
    PACKED_BITS,
    RUNTIME_BYTES,
    Footprint,
    MemoryPlan,
    Peaks,
    Roofline,
    show_bytes,
)
from gateway.cli.arguments import argument
from gateway.table import table
from quotas.policy import units

NOTES = """\
The floor of a step is max(weights / bandwidth, FLOPs / rate) + KV / bandwidth, of what the device sustains. Up to the
ridge reading the weights takes longer than the products, beyond it the products do.

--save-device writes steps that read the weights and then multiply, as a device of which `sluice simulate --device FILE`
and `sluice pools --device FILE` make steps.

examples:
  sluice plan Qwen/Qwen3-0.6B --memory 80GiB --gpu h100
  sluice plan meta-llama/Llama-3.1-70B --memory 80GiB --gpu h100 --tensor-parallel 4
  sluice plan ./llama-3-8b --memory 24GiB --max-model-len 8192 --bandwidth 0.9TB --flops 150T"""

_ASSUMED = {
    "weights": "config.json names no dtype: {} is assumed, in which the weights are stored",
    "nothing": "config.json names no dtype, and there are no weights to tell: {} is assumed; --dtype says another",
}
_SIZE, _COUNT = argument(units.size), argument(units.count)
_RATES = {"G": 1e9, "T": 1e12, "P": 1e15}
TOKEN_BUDGET = 2048  # of a step, unless max_num_seqs is larger
MAX_TABLE_BATCH = 512  # in the table, unless max_num_seqs is larger


def add_plan_command(commands: "_SubParsersAction[Any]") -> None:
    plan = commands.add_parser(
        "plan",
        help="a model's memory and its least step times on a GPU",
        usage="sluice plan MODEL [--gpu GPU] [--memory SIZE] [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    plan.add_argument("model", metavar="MODEL", help="the model: embedded, a local directory, or a hub name")
    plan.add_argument(
        "--memory", metavar="SIZE", type=_SIZE, help="memory of the device, such as 80GiB (default: --gpu's)"
    )
    plan.add_argument(
        "--dtype", choices=("auto", *ITEM_BYTES), default="auto", help="precision of the weights (default: as stored)"
    )
    plan.add_argument(
        "--quantization",
        choices=("none", *PACKED_BITS),
        default="none",
        help="bits of the weights of layers' products (default: none, those of --dtype)",
    )
    plan.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="precision of the KV cache (default: as --dtype)",
    )
    limits = plan.add_argument_group("limits")
    limits.add_argument(
        "--max-num-seqs", metavar="N", type=_COUNT, default=256, help="most sequences in one step (default: 256)"
    )
    limits.add_argument(
        "--max-model-len",
        metavar="TOKENS",
        type=_COUNT,
        help="most tokens of one sequence (default: the model's maximum)",
    )
    limits.add_argument(
        "--max-num-batched-tokens",
        metavar="TOKENS",
        type=_COUNT,
        help=f"most tokens in one step (default: {TOKEN_BUDGET}, or max_num_seqs if that is more)",
    )
    limits.add_argument(
        "--context",
        metavar="TOKENS",
        type=_COUNT,
        default=1024,
        help="tokens of each sequence in a step of decodes (default: 1024)",
    )
    device = plan.add_argument_group("device")
    device.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=_COUNT,
        default=1,
        help="ranks that divide the model, each on a device of --memory (default: 1)",
    )
    device.add_argument(
        "--rank-link", metavar="SIZE", type=_SIZE, help="bandwidth between two ranks, bytes a second, such as 360GB"
    )
    device.add_argument(
        "--gpu", choices=tuple(GPUS), default="h200", help="the GPU, by its published figures (default: h200)"
    )
    device.add_argument(
        "--bandwidth", metavar="SIZE", type=_SIZE, help="memory bandwidth, bytes a second, such as 4.3TB"
    )
    device.add_argument(
        "--flops", metavar="RATE", type=argument(_rate), help="sustained FLOP/s of matrix products, such as 790T"
    )
    device.add_argument("--save-device", metavar="FILE", type=Path, help="write the steps as a device to simulate")
    plan.set_defaults(run=_plan, parser=plan, capacity=None)
    for extension in extensions():
        module, function = extension.PLAN.split(":")
        getattr(import_module(module), function)(plan)


def _plan(namespace: Namespace) -> int:
    model = read_model_config(resolve_config(namespace.model))
    dtype = model.torch_dtype if namespace.dtype == "auto" else namespace.dtype
    ranks = namespace.tensor_parallel
    kv_item_bytes = 1 if namespace.kv_cache_dtype == "fp8" else None
    parts = [model] if ranks == 1 else [Shard.of(model, rank, ranks).stored(model) for rank in range(ranks)]
    if namespace.quantization != "none" and (ranks > 1 or model.experts is not None or dtype == "float32"):
        raise ConfigError(
            f"--quantization {namespace.quantization}: a GPU packs the weights of models without experts, on one rank, "
            "in 16 bits"
        )
    footprint = max(
        (Footprint(part, dtype, kv_item_bytes, quantization=namespace.quantization) for part in parts),
        key=lambda each: each.num_weights,
    )
    wanted_len = _max_model_len(namespace.max_model_len, model)
    budget = _token_budget(namespace.max_num_batched_tokens, namespace.max_num_seqs)
    memory = MemoryPlan.make(
        footprint, namespace.memory or MEMORY_BYTES[namespace.gpu], wanted_len, namespace.max_num_seqs, budget
    )
    context = min(namespace.context, memory.max_model_len)
    if namespace.dtype == "auto" and model.dtype_said_by != "config":
        print(f"{_ASSUMED[model.dtype_said_by].format(model.torch_dtype)}\n")
    name = namespace.model if ranks == 1 else f"{namespace.model}, each of {ranks} ranks"
    print(_memory(name, memory, context))
    roofline = Roofline(footprint, _peaks(namespace), ranks)
    print(_steps(roofline, memory, context))
    if namespace.save_device:
        _save(step_time_of(roofline), memory, namespace.save_device)
    if namespace.capacity is not None and (said := namespace.capacity(namespace, memory, step_time_of(roofline))):
        print(f"\n{said}")
    for warning in memory.warnings:
        print(f"\nwarning: {warning}")
    return 0


def step_time_of(roofline: Roofline) -> StepTime:
    """Return the roofline as coefficients: a step reads the weights once, and keys and values for each token of
    context; each token of a prompt attends to those before it. Windows are not counted.

    Products follow on reading, as on every device that was measured: on an A100 each token of a prompt costs 81 µs
    from the first one on, of which the products are 60 (Llama-3-8B: Agrawal et al., 2024).
    """
    footprint, model = roofline.footprint, roofline.footprint.model
    weights = (footprint.num_read * footprint.item_bytes - footprint.packed_away) / roofline.peaks.bandwidth
    token = 2 * footprint.num_multiplied / roofline.rate + roofline.exchange(1)
    context = footprint.kv_bytes_per_token / roofline.peaks.bandwidth
    pair = 4 * model.num_layers * model.num_heads * model.head_dim / roofline.rate
    return StepTime((weights, token, token, context, 0.0, pair, 0.0), expert_reads=footprint.expert_reads)


def _save(step_time: StepTime, plan: MemoryPlan, path: Path) -> None:
    """Write what a simulation's `--device` reads. Raises `ConfigError`."""
    entry = {
        "coefficients": step_time.coefficients,
        "knee": step_time.knee,
        "expert_reads": step_time.expert_reads,
        "kv_tokens": plan.kv_tokens,
        "kv_bytes_per_token": plan.footprint.kv_bytes_per_token,
    }
    try:
        path.write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-device {path}: cannot be written ({error.strerror})") from None


def _max_model_len(wanted: int | None, model: ModelConfig) -> int | None:
    if wanted is not None and wanted > model.max_position:
        raise ConfigError(f"--max-model-len {wanted:,}: the model has {model.max_position:,} positions")
    return wanted


def _token_budget(wanted: int | None, max_num_seqs: int) -> int:
    if wanted is not None and wanted < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {wanted:,}: each of --max-num-seqs {max_num_seqs:,} takes one token of a step; "
            "raise the first or lower the second"
        )
    return wanted or max(TOKEN_BUDGET, max_num_seqs)


def _peaks(namespace: Namespace) -> Peaks:
    peaks = GPUS[namespace.gpu]
    if namespace.bandwidth:
        peaks = replace(peaks, bandwidth=float(namespace.bandwidth))
    if namespace.flops:
        peaks = replace(peaks, flops=namespace.flops, flops_fp32=namespace.flops)
    if namespace.rank_link:
        peaks = replace(peaks, link=float(namespace.rank_link))
    return peaks


def _memory(name: str, plan: MemoryPlan, context: int) -> str:
    footprint = plan.footprint
    rows = [
        ("memory", show_bytes(plan.memory), ""),
        (
            "weights",
            show_bytes(footprint.weight_bytes),
            f"{footprint.num_weights / 1e6:,.1f} M x {_item(footprint)}{_of_a_token(footprint)}",
        ),
        (
            "activations",
            show_bytes(plan.working_bytes),
            f"of {plan.max_num_batched_tokens:,} tokens a step, estimated",
        ),
        ("graphs", show_bytes(plan.graph_bytes), "and activations that the largest keeps, estimated"),
        ("runtime", show_bytes(RUNTIME_BYTES), "context, libraries, kernels, estimated"),
        (
            "KV",
            show_bytes(plan.kv_bytes),
            f"{plan.kv_tokens:,} tokens of {footprint.kv_bytes(1) // BLOCK_SIZE:,} B",
        ),
        *(
            (
                f"a sequence of {tokens:,}",
                show_bytes(footprint.kv_bytes(tokens)),
                f"{plan.sequences_of(tokens):,} fit",
            )
            for tokens in dict.fromkeys((context, plan.max_model_len))
        ),
    ]
    heading = (f"{name}, {footprint.dtype}", "bytes", "")
    return table(heading, rows, frozenset({"bytes"}))


def _item(footprint: Footprint) -> str:
    if footprint.quantization == "none":
        return f"{footprint.item_bytes} B"
    return f"{footprint.item_bytes} B, those of layers in {PACKED_BITS[footprint.quantization]:g} bits"


def _of_a_token(footprint: Footprint) -> str:
    if footprint.model.experts is None:
        return ""
    return f", of which a token is multiplied with {footprint.num_multiplied / 1e6:,.1f} M"


def _steps(roofline: Roofline, plan: MemoryPlan, context: int) -> str:
    peaks = f"{roofline.peaks.bandwidth / 1e12:.2f} TB/s and {roofline.rate / 1e12:,.0f} TFLOP/s"
    title = f"floor of a decode step at context {context:,}, {peaks}; ridge at {roofline.ridge:,.0f} tokens a step"
    heading = ("batch", "step ms", "tokens/s", "bound by", "KV memory")
    rows = [_step(roofline, batch, context, plan.sequences_of(context)) for batch in _batches(plan.max_num_seqs)]
    prefill = f"floor of a prefill of {units.counted(context, 'token')}: {_ms(roofline.prefill(context))} ms"
    if roofline.num_ranks > 1:
        prefill += f", of which ranks exchange sums for {_ms(roofline.exchange(context))} ms"
    return f"{title}\n{table(heading, rows, frozenset(heading[:3]))}{prefill}\n"


def _step(roofline: Roofline, batch: int, context: int, fit: int) -> tuple[str, ...]:
    seconds = roofline.decode(batch, context)
    bound = "products" if batch > roofline.ridge else "weights"
    if batch * roofline.footprint.kv_bytes_read(context) / roofline.peaks.bandwidth > seconds / 2:
        bound = "KV"
    note = "" if batch <= fit else "does not fit"
    return f"{batch:,}", _ms(seconds), f"{batch / seconds:,.0f}", bound, note


def _ms(seconds: float) -> str:
    """Milliseconds with enough digits: a small model's step takes thousandths of one."""
    return f"{seconds * 1e3:.2f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3g}"


def _batches(max_num_seqs: int) -> list[int]:
    """The powers of two up to the table's largest batch, and the limit itself."""
    powers = [2**power for power in range(max(MAX_TABLE_BATCH, max_num_seqs).bit_length())]
    return sorted({*(batch for batch in powers if batch <= max(MAX_TABLE_BATCH, max_num_seqs)), max_num_seqs})


def _rate(text: str) -> float:
    unit = text[-1:]
    rate = units.number(text.removesuffix(unit)) * _RATES[unit] if unit in _RATES else units.number(text)
    if rate <= 0:
        raise ValueError("is not above 0")
    return rate
