"""Opens the core of a running gateway, with the step times learned by earlier runs."""

import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from admission.controller import Controller
from admission.core import EXPIRIES, ORDERS, PRIOR_STEP_TIME, CoreConfig, MemoryGate, Overload, make_core
from admission.event_logs.event_log import make_logged_core
from admission.step_times.step_time import StepTimeModel
from backend.config import EngineOptions
from backend.errors import ConfigError
from backend.extensions import extensions
from backend.loader import LoadedModel
from backend.scheduler.batching import RULES
from backend.scheduler.block_tables import POOLS
from backend.structured_output.compiler import GrammarCompiler
from backend.structured_output.process_setup import StructuredOutputOptions
from gateway.api.prompt_names import PromptNames
from gateway.settings.settings import Settings
from gateway.telemetry.event_log_file import EventLogFile

log = logging.getLogger(__name__)


@contextmanager
def open_core(settings: Settings, model: LoadedModel) -> Iterator[Controller]:
    """Yield a core for the running event loop; its step times are saved when the block is left. Raises `EventLogError`
    if its events cannot be recorded.
    """
    name = f"{_file_name(model, settings)}.json"
    path = settings.state_dir / "step_time" / name
    step_time = _load(path)
    with _open_core(settings, model, step_time) as core:
        try:
            yield core
        finally:
            _save(path, step_time.to_json())


@contextmanager
def _open_core(settings: Settings, model: LoadedModel, step_time: StepTimeModel) -> Iterator[Controller]:
    config = core_config(settings)
    if settings.event_log is None:
        yield make_core(config, model.engine_config, step_time, _report)
        return
    with EventLogFile(settings.event_log, settings.event_log_bytes) as file:
        core, event_log = make_logged_core(config, model.engine_config, step_time, file.write, _report)
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
    said = json.dumps([asdict(model.config), settings.kernels], sort_keys=True, default=sorted)
    digest = sha256(said.encode()).hexdigest()[:8]
    name = model.directory.resolve().name
    return f"{name}-{digest}-{dtype}-{model.runner.device.type}-{settings.threads}"


def _load(path: Path) -> StepTimeModel:
    try:
        return StepTimeModel.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return StepTimeModel(PRIOR_STEP_TIME)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not usable (%s); step times are learned anew", path, error)
        return StepTimeModel(PRIOR_STEP_TIME)


def _save(path: Path, state: dict[str, Any]) -> None:
    with suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.touch(0o600)
        draft.write_text(json.dumps(state))
        draft.replace(path)


def make_prompt_names(model: LoadedModel, core: Controller) -> PromptNames | None:
    """The names of prompts' blocks, also applied to answers' blocks; None: no block is shared.

    The secret of the names is private to this process, as is the cache: a name reveals nothing.
    """
    if not model.engine_config.shares_blocks:
        return None
    names = model.block_names(secrets.token_bytes(32))
    core.scheduler.name_blocks_by(names)
    return PromptNames(names, model.engine_config.block_size)


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
