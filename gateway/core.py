"""Opens the core of a running gateway, with the step times learned by earlier runs."""

import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from admission.controller import Controller
from admission.core import EXPIRIES, ORDERS, PRIOR_STEP_TIME, CoreConfig, MemoryGate, Overload, make_core
from admission.event_logs.event_log import make_logged_core
from admission.step_times.step_time import StepTimeModel
from backend.config import EngineConfig, EngineOptions
from backend.errors import ConfigError
from backend.extensions import extensions
from backend.loader import LoadedModel
from backend.model.model_config import ModelConfig
from backend.roofline import Footprint
from backend.scheduler.batching import RULES
from backend.scheduler.block_tables import POOLS
from backend.structured_output.compiler import GrammarCompiler
from backend.structured_output.process_setup import StructuredOutputOptions
from gateway.api.prompt_names import PromptNames
from gateway.settings.settings import Settings
from gateway.telemetry.event_log_file import EventLogFile

_FIELDS_ALWAYS_SAID = 23  # of a `ModelConfig`, up to `dtype_said_by`, which the oldest files' names cover
log = logging.getLogger(__name__)


@contextmanager
def open_core(settings: Settings, model: LoadedModel, others: Iterable[LoadedModel] = ()) -> Iterator[Controller]:
    """Yield a core for the running event loop; its models' step times are saved when the block is left. Raises
    `EventLogError` if its events cannot be recorded.
    """
    models, folder = [model, *others], settings.state_dir / "step_time"
    paths = [folder / f"{_file_name(one, settings)}.json" for one in models]
    config = _shared_config(settings, models)
    step_times = [_load(path, config.expert_reads_of(number)) for number, path in enumerate(paths)]
    with _open_core(settings, model, config, step_times) as core:
        try:
            yield core
        finally:
            for path, step_time in zip(paths, step_times, strict=True):
                _save(path, step_time.to_json())


def _shared_config(settings: Settings, models: list[LoadedModel]) -> EngineConfig:
    """The limits of an engine of these models. Raises `ConfigError`."""
    first, longest = models[0].engine_config, max([one.engine_config.max_model_len for one in models])
    if any(one.config.experts for one in models):
        first = replace(first, expert_reads=tuple([Footprint(one.config, "float32").expert_reads for one in models]))
    if first.max_adapter_rank and len(models) > 1:
        seconds = [each for one in models for each in one.engine_config.adapter_block_seconds]
        first = replace(first, adapter_block_seconds=tuple(seconds))
    if len(models) > 1 and any(one.engine_config.window_groups for one in models):
        windows = [(one.engine_config.window_groups, one.engine_config.window_tokens) for one in models[1:]]
        first = replace(first, further_windows=tuple(windows))
    sleeping = [one.runner.weights for one in models if one.runner.weights is not None]
    if not sleeping:
        return replace(first, max_model_len=longest)
    sizes, waking = tuple([one.num_bytes for one in sleeping]), tuple([one.seconds for one in sleeping])
    awake_bytes = settings.awake_bytes or 0
    return replace(first, max_model_len=longest, awake_bytes=awake_bytes, weight_bytes=sizes, wake_seconds=waking)


@contextmanager
def _open_core(
    settings: Settings, model: LoadedModel, engine_config: EngineConfig, step_times: list[StepTimeModel]
) -> Iterator[Controller]:
    config, (step_time, *others) = core_config(settings), step_times
    if settings.event_log is None:
        yield make_core(config, engine_config, step_time, _report, others)
        return
    with EventLogFile(settings.event_log, settings.event_log_bytes) as file:
        core, event_log = make_logged_core(config, engine_config, step_time, file.write, _report, others)
        block_bytes = model.kv_bytes // model.engine_config.num_blocks
        event_log.serves(settings.served_name, block_bytes, time.time(), time.monotonic())
        yield core


def _report(error: Exception) -> None:
    log.error("an observer of the core failed", exc_info=error)


def core_config(settings: Settings) -> CoreConfig:
    """Return the core's configuration as the settings choose it. Raises `ConfigError`."""
    for extension in extensions():
        import_module(extension.CHOICES)
    all_choices: dict[str, Collection[str]] = {
        "order": ORDERS,
        "batching": RULES,
        "overload": EXPIRIES,
        "kv_allocation": POOLS,
    }
    for name, choices in all_choices.items():
        if (chosen := getattr(settings, name)) not in choices:
            raise ConfigError(f"--{name.replace('_', '-')} {chosen}: must be one of {', '.join(choices)}")
    return CoreConfig(
        order=settings.order,
        memory=MemoryGate(settings.admit),
        prefill_share=settings.prefill_share,
        spare_share=settings.spare_share,
        calibration=settings.calibration == "on",
        overload=Overload(settings.overload),
        max_waiting=settings.max_waiting,
    )


def _file_name(model: LoadedModel, settings: Settings) -> str:
    """A file name that covers all factors of step times: the model's shape, its precision, device, kernels and threads.
    It begins with the name of the model's folder, for people.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    said = json.dumps([_shape(model.config), settings.kernels], sort_keys=True, default=sorted)
    digest = sha256(said.encode()).hexdigest()[:8]
    name = model.directory.resolve().name
    return f"{name}-{digest}-{dtype}-{model.runner.device.type}-{settings.threads}"


def _shape(config: ModelConfig) -> dict[str, Any]:
    """The fields without those at their defaults, so that a field of a new version renames no file."""
    later = {field.name: field.default for field in fields(config)[_FIELDS_ALWAYS_SAID:]}
    return {name: value for name, value in asdict(config).items() if name not in later or value != later[name]}


def _load(path: Path, expert_reads: tuple[float, float]) -> StepTimeModel:
    try:
        return StepTimeModel.from_json(json.loads(path.read_text()), expert_reads)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s is not usable (%s); step times are learned anew", path, error)
        return StepTimeModel(replace(PRIOR_STEP_TIME, expert_reads=expert_reads))


def _save(path: Path, state: dict[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.touch(0o600)
        draft.write_text(json.dumps(state))
        draft.replace(path)


def make_prompt_names(models: Iterable[LoadedModel], core: Controller) -> list[PromptNames | None]:
    """The names of each model's prompts' blocks; the first's are also applied to answers' blocks of all, whose roots
    are their models' own. None: no block is shared.

    The secret of the names is private to this process, as is the cache: a name reveals nothing.
    """
    config, secret, first, found = core.scheduler.config, secrets.token_bytes(32), None, list[PromptNames | None]()
    for number, model in enumerate(models):
        names = model.block_names(secret, first, number)
        first = first or names
        found.append(PromptNames(names, config.block_size) if config.shares_blocks else None)
    if first is not None and config.shares_blocks:
        core.scheduler.name_blocks_by(first)
    return found


def make_grammar_compiler(settings: Settings, model: LoadedModel) -> GrammarCompiler | None:
    """The compiler of grammars; None without structured output."""
    masks = model.runner.masks
    return None if masks is None else GrammarCompiler(masks.processes, settings.grammar_cache_bytes)


def structured_output_options(settings: Settings) -> StructuredOutputOptions:
    return StructuredOutputOptions(
        num_processes=settings.grammar_processes,
        jump_forward=settings.jump_forward == "on",
        compile_seconds=settings.grammar_compile_ms / 1000,
    )


def engine_options(settings: Settings) -> EngineOptions:
    """Return the engine's options: the settings of their names."""
    names = {field.name for field in fields(EngineOptions)} & Settings.model_fields.keys()
    chosen: dict[str, Any] = {name: getattr(settings, name) for name in names}
    rank = settings.max_adapter_rank if settings.serves_adapters else 0
    return EngineOptions(**(chosen | {"prefix_cache": settings.prefix_cache == "on", "max_adapter_rank": rank}))
