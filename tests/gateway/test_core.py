from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import pytest
import torch

from admission.core import CoreConfig, MemoryGate, Overload, make_core
from admission.outcome import QueueFull
from backend.config import Batching, EngineConfig, EngineOptions
from backend.errors import ConfigError
from backend.loader import LoadedModel
from backend.model.hub import resolve_model
from backend.model.model_config import ModelConfig, read_model_config
from backend.scheduler.batch import StepOutput
from backend.scheduler.batching import BatchingRule
from backend.scheduler.sequence import FinishReason
from gateway import core as gateway_core
from gateway.core import core_config, engine_options, open_core
from gateway.settings.settings import Settings
from gateway.tenants.live_policy import scheduling_policy
from quotas.policy.policy import DEFAULT_POLICY
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=128)


def test_every_choice_of_the_core_is_one_of_the_operators_but_what_takes_an_amount() -> None:
    fields = Settings.model_fields
    assert {*get_args(fields["admit"].annotation)} == {*MemoryGate} - {MemoryGate.MINIMUM_FREE}
    assert get_args(fields["overload"].annotation) == tuple(Overload)


def test_a_rule_of_batching_that_no_package_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_core, "RULES", {Batching.CONTINUOUS: BatchingRule})
    with pytest.raises(ConfigError, match="--batching window: must be one of continuous"):
        core_config(Settings(batching="window"))


def test_the_defaults_are_the_cores() -> None:
    assert core_config(Settings()) == CoreConfig()


def test_the_engines_options_are_settings_of_their_names_and_defaults() -> None:
    assert engine_options(Settings()) == EngineOptions()
    assert {field.name for field in fields(EngineOptions)} - Settings.model_fields.keys() == {"steps_in_flight"}
    assert engine_options(Settings(prefix_cache="off")) == EngineOptions(prefix_cache=False)


def test_an_unknown_order_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--order random: must be one of fair, fcfs"):
        core_config(Settings(order="random"))


@pytest.mark.parametrize("overload", ["unbounded", "bounded"])
def test_unbounded_lifts_the_queues_of_the_policys_classes_too(overload: str) -> None:
    core = make_core(core_config(Settings(overload=overload, max_waiting=200_000)), ENGINE)
    core.set_policy(scheduling_policy(DEFAULT_POLICY), 0.0)
    refused: list[QueueFull] = []
    for n in range(1200):
        try:
            asked = make_sequence(f"{n}", "t", [1] * 4, 9, (), priority_class=1)
            core.arrive(asked, 0.0)
        except QueueFull as refusal:
            refused.append(refusal)
    assert len(refused) == (0 if overload == "unbounded" else 1200 - 1024)
    assert all(refusal.of_class and refusal.excess.bound == 1024 for refusal in refused)


@pytest.mark.parametrize("order", ["fair", "fcfs"])
def test_every_order_serves(order: str) -> None:
    core = make_core(core_config(Settings(order=order)), ENGINE)
    sequences = [
        make_sequence(f"{n}", f"tenant-{n % 3}", [1] * (5 + n), 9, (), priority_class=n % 2) for n in range(12)
    ]
    now = 0.0
    for sequence in sequences:
        core.arrive(sequence, now)
    while (batch := core.schedule(now)) is not None:
        now += 0.01
        core.update_from_output(StepOutput(batch.step, [5] * len(batch.sampled), 0.01), now)
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)


def loaded(directory: Path, config: ModelConfig) -> LoadedModel:
    """Returns as much of a model as its core knows."""
    device = SimpleNamespace(device=torch.device("cpu"), weights=None)
    shape = SimpleNamespace(
        directory=directory, config=config, engine_config=ENGINE, dtype=torch.float32, runner=device, kv_bytes=64_000
    )
    return cast(LoadedModel, shape)


def run(state: Path, directory: Path, config: ModelConfig, kernels: str = "auto") -> str:
    """A run of a model; returns the name of the file that it kept its step times in."""
    before = {path: path.stat().st_mtime_ns for path in state.glob("step_time/*")}
    with open_core(Settings(state_dir=state, kernels=kernels), loaded(directory, config)):
        pass
    (kept,) = [path for path in state.glob("step_time/*") if before.get(path) != path.stat().st_mtime_ns]
    return kept.name


def test_step_times_are_kept_for_what_a_model_is_and_not_for_what_its_folder_is_called(tmp_path: Path) -> None:
    config = read_model_config(resolve_model("embedded"))
    larger = replace(config, num_layers=config.num_layers + 1)
    first = run(tmp_path, Path("/models/a/model"), config)
    assert first.startswith("model-")
    assert run(tmp_path, Path("/models/b/model"), config) == first
    assert len({first, run(tmp_path, Path("/models/b/model"), larger)}) == 2
    assert len({first, run(tmp_path, Path("/models/a/model"), config, "reference")}) == 2


def test_step_times_learned_by_an_earlier_version_are_found(tmp_path: Path) -> None:
    config = read_model_config(resolve_model("embedded"))
    assert "47b7c581" in run(tmp_path, Path("/models/a/model"), config)
