"""Every family with all that its batches may meet at once: greedy tokens in float32 are transformers'.

Prompts with common beginnings, several answers to one, in chunks, in memory for a few of them, swapped and preempted,
with steps in flight that are lost; the model alone beside two adapters, or divided among two ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.kernels.torch_ops import TorchOps
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig, read_model_config
from backend.model.weights import load_weights
from backend.parallel.rank_group import Parallel
from backend.parallel.runners import LeadingRunner
from backend.scheduler.batch import Counters
from backend.sizing import ModelDemand, size_engine
from backend.worker import model_runner
from backend.worker.executor import Executor
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.adapters import MODULES
from tests.backend.adapters import merged_model, random_adapter, random_tensors
from tests.backend.families import FAMILIES, likeliest, random_model, save_checkpoint
from tests.backend.parallel.ranks import lead
from tests.backend.runners import AheadStream
from tests.backend.test_llm import ScarceExecutor
from tests.examples import examples

SERVED = [family for family in FAMILIES if family != "dynamic-scaling"]
DAILY = ("qwen2-window-tied",)  # of windows and layers without
LONGEST, RANK = 160, 2
OPTIONS = EngineOptions(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=LONGEST, prefill_chunk=24, swap_space_bytes=2**22
)
DAILY_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=examples(DAILY_TOKENS, at_night=60), ignore_eos=True)
ADAPTERS = {"all": MODULES, "attention": MODULES[:4]}
Answers = list[list[int]]


@dataclass(frozen=True)
class Checkpoint:
    """A random model of a family, with two adapters."""

    family: str
    folder: Path
    config: ModelConfig

    @classmethod
    def save(cls, family: str, folder: Path) -> "Checkpoint":
        save_checkpoint(family, folder)
        return cls(family, folder, read_model_config(folder))

    def modules(self, name: str) -> tuple[str, ...]:
        return ADAPTERS[name] if self.config.experts is None else MODULES[:4]

    def scarce(self, adapters: Sequence[str]) -> EngineOptions:
        """Options with memory for the longest text, some of another, and these adapters."""
        options = replace(OPTIONS, kv_memory_bytes=2**26, max_adapter_rank=RANK if adapters else 0)
        demand = ModelDemand(options, self.config, torch.float32)
        each, engine = demand.own_block_bytes, size_engine(demand, 2**40)
        blocks = 1 + engine.kv_blocks(LONGEST) * 3 // 2
        for name in adapters:
            numbers = sum(one.numel() for one in random_tensors(self.model(), RANK, self.modules(name), 1).values())
            blocks += 2 + numbers * 5 // each  # of four bytes, and some between vectors
        return replace(options, kv_memory_bytes=blocks * each)

    def model(self, adapter: str | None = None) -> PreTrainedModel:
        if adapter is None:
            return random_model(self.family)
        return merged_model(self.family, RANK, self.modules(adapter), seed=len(adapter))

    def check(self, asked: list[list[int]], names: Sequence[str | None], found: Answers) -> None:
        models = {name: self.model(name) for name in dict.fromkeys(names)}
        expected = [likeliest(models[name], *each) for name, *each in zip(names, asked, found, strict=True)]
        assert found == expected


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(131, (80,), generator=generator).tolist()
    own = [torch.randint(131, (9,), generator=generator).tolist() for _ in range(4)]
    several = common + own[0]
    return [*own, several, several, own[2] * 9, common[:70] + own[3], several, common[:33], *own]


def answers(llm: LLM, names: Sequence[str | None]) -> Answers:
    adapters = names if any(names) else None
    found = llm.generate(prompts(), GREEDY, progress=False, adapters=adapters)
    llm.scheduler.check_integrity()
    assert llm.scheduler.kv_manager.num_held == 0
    return [one.token_ids for one in found]


def check_counters(counters: Counters) -> None:
    assert min(counters.swapped_in, counters.cached_tokens) > 0
    preempted = counters.preemptions + counters.rollback_preemptions
    assert preempted > 0 or GREEDY.max_tokens == DAILY_TOKENS, "answers grow beyond the memory at night"


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in DAILY else pytest.mark.nightly) for one in SERVED]
)
def test_mixed_with_adapters_and_through_lost_steps(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "measure_adapters", lambda *_: (0.0, 0.0, 0.0))
    saved = Checkpoint.save(family, tmp_path / "model")
    model = LLM(str(saved.folder), saved.scarce([*ADAPTERS])).model
    ahead = ModelRunner(model.runner.decoder, model.runner.kv, model.runner.config, AheadStream())
    model = replace(model, runner=ahead)
    names = [(None, *ADAPTERS)[number % 3] for number in range(len(prompts()))]
    names[5] = names[8] = names[4]  # several answers
    executors: list[Executor] = [*[ahead] * (GREEDY.max_tokens != DAILY_TOKENS), ScarceExecutor(ahead)]
    for executor in executors:
        llm = LLM.of(model, executor)
        for name in ADAPTERS:
            folder = tmp_path / name
            if not folder.exists():
                random_adapter(family, folder, RANK, saved.modules(name), len(name))
            llm.load_adapter(name, folder)
        found = answers(llm, names)
        assert answers(llm, names) == found
        saved.check(prompts(), names, found)
        check_counters(llm.scheduler.counters)
    assert llm.scheduler.counters.lost_steps > 10


@pytest.mark.nightly
@pytest.mark.parametrize("family", SERVED)
def test_on_two_ranks(family: str, tmp_path: Path) -> None:
    saved = Checkpoint.save(family, tmp_path / "model")
    model, names = LLM(str(saved.folder), saved.scarce([])).model, [None] * len(prompts())

    def part(parallel: Parallel) -> Decoder:
        weights = load_weights(saved.folder, saved.config, torch.float32, shard=parallel.shard)
        return Decoder(saved.config, weights, TorchOps(), LONGEST, parallel, model.runner.decoder.groups)

    def run(runner: LeadingRunner) -> tuple[Answers, Counters]:
        llm = LLM.of(model, runner)
        found = answers(llm, names)
        assert answers(llm, names) == found
        return found, llm.scheduler.counters

    found, counters = lead(2, tmp_path, model.engine_config, run, make_decoder=part, model=saved.config)
    saved.check(prompts(), names, found)
    check_counters(counters)
