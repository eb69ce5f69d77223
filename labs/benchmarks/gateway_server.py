"""The whole gateway over a simulated device, as a process that a benchmark starts.

Prints its port and key when it serves; for each line on standard input, what the device and the event loop's thread
have done by then.
"""

import argparse
import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch
import uvloop

from admission.controller import Controller
from admission.core import CoreConfig, make_core
from admission.promise import Promise
from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig
from backend.engine import Engine
from backend.loader import LoadedModel
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream
from backend.text.tokenizer import Tokenizer
from backend.worker import calibration
from backend.worker.model_runner import ModelRunner
from gateway.admin.port import open_admin_port
from gateway.app import SWITCH_INTERVAL_SECONDS, GatewayInputs, TenantSources, serve, serve_engine
from gateway.http.server import open_ports
from gateway.settings.machine import GC_THRESHOLDS
from gateway.settings.settings import Settings
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.request_record import Chunk, SequenceTimeline
from gateway.tenants.key_source import KeySource
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.quota_store import open_store
from labs.benchmarks.machine import num_writes
from labs.benchmarks.parts import PartSampler
from labs.benchmarks.simulated_executor import SimulatedExecutor, TokenRule

TEXT = " the quick brown fox jumps over the lazy dog"
KEY = "sk-benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a step keeps the device busy")
    parser.add_argument("--token-us", type=float, default=0.0, help="how much longer for each row it has")
    parser.add_argument("--prompt-us", type=float, default=0.0, help="how much longer for each token of a prompt")
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--instant", action="store_true", help="an engine that answers whole at once, without steps")
    parser.add_argument("--calibrate", action="store_true", help="calibrate the device before it serves")
    parser.add_argument("--sample", action="store_true", help="tell what each part of the gateway costs, see parts.py")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the gateway")
    arguments = parser.parse_args()
    chosen = dict(pair.split("=", 1) for pair in arguments.set)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with suppress(KeyboardInterrupt), TemporaryDirectory() as state, runner:
        settings = Settings(**defaults(Path(state)) | chosen)
        sampler = PartSampler()
        if arguments.sample:
            sampler.start()
        device = Device(arguments.step_ms / 1e3, arguments.token_us / 1e6, arguments.prompt_us / 1e6)
        how = {"instant": arguments.instant, "calibrates": arguments.calibrate}
        runner.run(_serve(settings, device, arguments.steps_in_flight, sampler, **how))


def defaults(state_dir: Path) -> dict[str, Any]:
    settings = {"demo_key": KEY, "port": 0, "admin_port": "off", "max_num_seqs": 256, "threads": 1}
    return settings | {"state_dir": state_dir, "metrics_on_tenant_port": True}


@dataclass(slots=True)
class Device:
    """Returns the duration of each step, and counts steps and their rows."""

    step_seconds: float
    row_seconds: float
    prompt_seconds: float = 0.0  # a token
    steps: int = 0
    rows: int = 0

    def __call__(self, batch: Batch) -> float:
        self.steps += 1
        self.rows += len(batch.slots)
        prompts = self.prompt_seconds * sum(batch.lengths[batch.num_decodes :])
        return self.step_seconds + self.row_seconds * len(batch.slots) + prompts

    @property
    def takes_time(self) -> bool:
        return self.step_seconds + self.row_seconds + self.prompt_seconds > 0


class CalibratedDevice(SimulatedExecutor):
    """Is calibrated before it serves, as a real one is: by what it says that the steps would take."""

    device, masks, adapters, weights = torch.device("cpu"), None, None, None
    kv = SimpleNamespace(dtype=torch.float32, memory=torch.empty(0, 0))

    def __init__(self, step_time: Device, token: TokenRule, config: EngineConfig) -> None:
        super().__init__(step_time, token, step_time.takes_time)
        self._config = config

    def calibrate(self, seconds: float) -> calibration.Measured:
        steps = [step for series in calibration_series(self._config) for step in series]
        return [(step, self._step_time(self.calibration_batch(step))) for step in steps]

    def calibration_batch(self, step: CalibrationStep) -> Batch:
        return calibration.batch_of(step, self._config, self._config.num_blocks)


class InstantTelemetry(CoreTelemetry):
    """Records each sequence as if the engine took it through a single step."""

    def timeline(self, sequence: Sequence) -> SequenceTimeline:
        now = sequence.arrival
        chunk, promise = Chunk(0, 0, sequence.num_prompt_tokens, now), Promise()
        return SequenceTimeline(
            sequence, promise, now, now, 0.0, prefilled=now, first_token=now, ended=now, released=now, chunks=[chunk]
        )


class InstantEngine(Engine):
    """An engine with the whole answer at the request's arrival: the gateway is left to measure."""

    def __init__(self, core: Controller, executor: SimulatedExecutor, words: list[int]) -> None:
        super().__init__(core, executor)
        self._words = words

    def submit(self, sequence: Sequence, make_stream: Callable[[Sequence], TokenStream] = TokenStream) -> TokenStream:
        sequence.arrival = self.clock()
        stream = make_stream(sequence)
        for index in range(sequence.request.max_tokens):
            sequence.output.append(self._words[index % len(self._words)])
            last = index == sequence.request.max_tokens - 1
            stream.put(FinishReason.LENGTH if last else None)
        return stream


async def _serve(
    settings: Settings,
    device: Device,
    steps_in_flight: int,
    sampler: PartSampler,
    *,
    instant: bool = False,
    calibrates: bool = False,
) -> None:
    model = _simulated_model(settings, steps_in_flight)
    words = model.tokenizer.encode_text(TEXT, add_special_tokens=False)
    executor: SimulatedExecutor

    def word(_: int, position: int) -> int:
        return words[position % len(words)]

    if calibrates:
        executor = CalibratedDevice(device, word, model.engine_config)
        model = replace(model, runner=cast("ModelRunner", executor))
    else:
        executor = SimulatedExecutor(device, word, device.takes_time)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    policies = LivePolicy(settings.policy)
    keys = KeySource(settings, policies.current)
    with (
        open_ports("127.0.0.1", 0, settings.num_http_workers or 1) as socks,
        open_admin_port(settings) as admin,
        open_store(settings) as store_url,
    ):
        tenants = TenantSources(keys, policies, store_url)
        asyncio.get_running_loop().add_reader(sys.stdin, _tell, executor, device, sampler)
        ready = json.dumps({"port": socks[0].getsockname()[1], "key": KEY, "admin_port": admin and admin.number})
        announce = partial(print, ready, flush=True)
        serving = GatewayInputs(settings, {settings.served_name: model}, tenants, socks, announce, admin, {})
        if not instant:
            await serve(serving, executor)
            return
        core = make_core(CoreConfig(), model.engine_config)
        engine = InstantEngine(core, executor, words)
        await serve_engine(serving, engine, InstantTelemetry(core))


def _simulated_model(settings: Settings, steps_in_flight: int) -> LoadedModel:
    """The embedded model's tokenizer and limits, and none of its weights."""
    directory = resolve_model("embedded")
    config = read_model_config(directory)
    engine_config = EngineConfig(
        num_blocks=40_000,
        max_model_len=config.max_position,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=2048,
        steps_in_flight=steps_in_flight,
        prefix_cache=settings.prefix_cache == "on",
    )
    tokenizer = Tokenizer.from_dir(directory, config.vocab_size)
    kv = SimpleNamespace(dtype=torch.float32, memory=torch.empty(0, 0), blocks=torch.empty(0, config.num_layers))
    # It runs nothing: the executor is given to `serve` itself.
    runner = SimpleNamespace(device=torch.device("cpu"), kv=kv, masks=None, adapters=None, weights=None)
    return LoadedModel(
        directory=directory,
        config=config,
        engine_config=engine_config,
        tokenizer=tokenizer,
        runner=cast("ModelRunner", runner),
        dtype=torch.float32,
        num_parameters=0,
        sampling_defaults={},
    )


def _tell(executor: SimulatedExecutor, device: Device, sampler: PartSampler) -> None:
    if not sys.stdin.readline():
        asyncio.get_running_loop().remove_reader(sys.stdin)
        signal.raise_signal(signal.SIGINT)
        return
    now = {"at": time.perf_counter(), "loop_cpu": time.thread_time(), "process_cpu": time.process_time()}
    done = {"busy": executor.busy, "idle": executor.idle, "steps": device.steps, "rows": device.rows}
    print(json.dumps({**now, **done, "writes": num_writes(), "samples": sampler.samples}), flush=True)


if __name__ == "__main__":
    main()
