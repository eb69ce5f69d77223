"""Checks that the model exists and fits the machine, and that processor cores are divided well."""

from dataclasses import dataclass
from pathlib import Path

from backend.errors import BackendError, ConfigError
from backend.model.hub import resolve_config
from backend.model.model_config import ModelConfig, read_model_config
from backend.model.shards import Shards
from backend.parallel.shard import Shard
from backend.placement import select_device, select_dtype, size_for_device
from backend.roofline import Footprint, show_bytes
from backend.sizing import ModelDemand, free_memory, size_engine
from backend.worker.device_memory import free_and_total
from gateway.core import engine_options
from gateway.doctor.check import Check, ok, problem, warning
from gateway.settings.machine import usable_cores
from gateway.settings.settings import Settings
from gateway.tenants.cache_limits import KVPool, room_problems
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy_file import PolicyError

SPARE_MEMORY_SHARE = 0.1  # of the free memory: for requests, logits and libraries


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's planned memory, and the free memory, in bytes."""

    weights: int
    kv: int
    free: int
    num_blocks: int
    max_model_len: int
    longest: int  # the most blocks of a sequence of that length


def model(settings: Settings) -> list[Check]:
    """Check the files of each model, and memory for the first. For a hub name, config.json alone is downloaded."""
    found: list[Check] = []
    for number, name in enumerate(settings.models.values()):
        try:
            directory = resolve_config(name)
            config = read_model_config(directory)
        except BackendError as error:
            found.append(problem("model", str(error)))
        else:
            found += [_files(name, directory), *([] if number else [_memory(settings, config)])]
    return found


def _files(name: str, directory: Path) -> Check:
    if not any(directory.glob("*.safetensors")):
        return ok("model", f"{name}: config.json is there, the weights are downloaded at the first start")
    try:
        num_bytes = Shards(directory).num_bytes
    except BackendError as error:
        return problem("model", str(error))
    return ok("model", f"{name}: {show_bytes(num_bytes)} of weights in {directory}")


def _memory(settings: Settings, config: ModelConfig) -> Check:
    try:
        plan = plan_memory(settings, config, free_memory())
    except ConfigError as error:
        return problem("memory", str(error))
    found = (
        f"weights {show_bytes(plan.weights)} and KV {show_bytes(plan.kv)} ({plan.num_blocks:,} blocks, "
        f"{plan.max_model_len:,} tokens a request) of {show_bytes(plan.free)} free"
    )
    if plan.weights + plan.kv > (1 - SPARE_MEMORY_SHARE) * plan.free:
        return warning("memory", found, "leave a tenth free, or the kernel may end the process: --kv-memory-bytes")
    return ok("memory", found)


def plan_memory(settings: Settings, config: ModelConfig, free: int) -> Plan:
    """Plan a model's memory; `free` bytes of the host are available, and a GPU is asked itself.

    Raises `ConfigError`, with the arithmetic, where the model does not fit.
    """
    ranks = settings.tensor_parallel
    options, device = engine_options(settings), select_device(settings.device, ranks)
    dtype = select_dtype(settings.dtype, config, device)
    shard = Shard.of(config, 0, ranks) if ranks > 1 else None
    packing = options.quantization if device.type == "cuda" else "none"
    weights = Footprint(config, str(dtype).removeprefix("torch."), quantization=packing).weight_bytes
    demand = ModelDemand(options, config, dtype, shard)
    each = demand.own_block_bytes
    if device.type == "cuda":
        free = ranks * free_and_total(device)[0]
        engine = size_for_device(demand, device)
    else:
        _check_weights_fit(weights, free)
        engine = size_engine(demand, free - weights)
    kv = engine.num_blocks * each
    longest = engine.kv_blocks(engine.max_model_len)
    return Plan(weights, kv, free, engine.num_blocks, engine.max_model_len, longest)


def _check_weights_fit(weights: int, free: int) -> None:
    if weights >= free:
        raise ConfigError(
            f"the weights take {show_bytes(weights)}, and {show_bytes(free)} are free: a 16-bit --dtype or a smaller "
            "model, or more memory"
        )


def floors(settings: Settings) -> list[Check]:
    """Check that the policy's floors of cached memory leave room to serve, if it has any."""
    try:
        current = LivePolicy(settings.policy).current
        if not any(current.cache_limits(tenant).floor for tenant in current.tenants):
            return []
        plan = plan_memory(
            settings, read_model_config(resolve_config(settings.models[settings.served_name])), free_memory()
        )
    except (PolicyError, BackendError):
        return []  # another check reports it
    caches = settings.prefix_cache == "on" and settings.kv_allocation == "paged"
    pool = KVPool(plan.num_blocks, plan.kv // plan.num_blocks, plan.max_model_len, plan.longest, caches)
    problems = [problem("floors", f"{field}: {message}") for field, message in room_problems(current, pool)]
    return problems or [ok("floors", "the policy's floors and pins leave room for the longest sequence")]


def threads(settings: Settings, cores: int | None = None) -> Check:
    usable = usable_cores() if cores is None else cores
    found = f"{settings.threads} for the model on {usable} cores"
    if settings.threads > usable:
        return warning("threads", found, f"they wait for one another; lower --threads to {max(1, usable - 1)}")
    if settings.threads == usable > 1:
        return warning("threads", found, f"the event loop has no core of its own; lower --threads to {usable - 1}")
    return ok("threads", found)
