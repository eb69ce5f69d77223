"""Several models in one memory, with windows of different lengths and with adapters: each answers as alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from backend.adapter_registry import AdapterRegistry
from backend.config import EngineOptions
from backend.llm import OfflineEngine
from backend.loader import LoadedModel, load_model, shared_block_bytes
from backend.paged_kv.block_names import adapter_salt
from backend.sampling_params import SamplingParams
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker import model_runner
from backend.worker.several_runners import SeveralRunners
from labs.benchmarks.adapters import MODULES
from tests.backend.adapters import merged_model, random_adapter
from tests.backend.families import likeliest, random_model, save_checkpoint
from tests.backend.test_every_family import prompts
from tests.examples import examples

WINDOWS = {"gemma3": (5, 8), "mistral-no-window": (0, 0), "gpt-oss": (2, 7)}  # groups of one layer, and what they see
ATTENTION, NUM_TOKENS = MODULES[:4], examples(8, at_night=40)
OPTIONS = EngineOptions(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    prefill_chunk=24,
    max_model_len=160,
    kv_memory_bytes=100 * 7680,
    swap_space_bytes=2**22,
    max_adapter_rank=2,
)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 6])
def test_each_model_answers_as_alone(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`every`: of how many prompts one is asked."""
    monkeypatch.setattr(model_runner, "measure_adapters", lambda *_: (0.0, 0.0, 0.0))
    folders = [save_checkpoint(family, tmp_path / family) for family in WINDOWS]
    size, models = shared_block_bytes(folders, OPTIONS, "auto", "cpu"), list[LoadedModel]()
    assert size == 7680, "of the one without a window"
    for folder in folders:
        first = models[0].runner if models else None
        model = load_model(str(folder), OPTIONS, device="cpu", least_block_bytes=size, beside=first)
        models.append(model)
    adapters = AdapterRegistry(models)
    for number, family in enumerate(WINDOWS):
        path = random_adapter(family, tmp_path / f"of {family}", 2, ATTENTION)
        adapters.add(family, path, adapters.read(path, number), number)
    (own, seen), *others = [(one.engine_config.window_groups, one.engine_config.window_tokens) for one in models]
    assert [(own, seen), *others] == [*WINDOWS.values()]
    config = replace(models[0].engine_config, further_windows=tuple(others), steps_in_flight=1)
    scheduler, names = Scheduler(config, FirstComeFirstServed()), [models[0].block_names(b"s")]
    names += [one.block_names(b"s", names[0], number) for number, one in enumerate(models) if number]
    scheduler.name_blocks_by(names[0])
    engine = OfflineEngine(scheduler, SeveralRunners([one.runner for one in models]))
    for turn in range(2):
        asked = [
            (number, family, has_adapter, prompt)
            for prompt in prompts()[::every]
            for number, family in enumerate(WINDOWS)
            for has_adapter in (False, True)
        ]
        sequences = list[Sequence]()
        for index, (number, family, has_adapter, prompt) in enumerate(asked):
            adapter = adapters.get(family) if has_adapter else None
            greedy = SamplingParams(temperature=0)
            request = PromptRequest(
                f"{turn} {index}", "t", prompt, greedy, NUM_TOKENS, 0, frozenset(), adapter=adapter, model=number
            )
            root = names[number].root(*adapter_salt(None if adapter is None else adapter.digest))
            sequences.append(Sequence(request, float(index), cache_root=root))
            names[number].name(sequences[-1], len(prompt) // config.block_size)
            scheduler.add(sequences[-1])
        while scheduler.has_work:
            engine.step()
        scheduler.check_integrity()
        assert scheduler.kv_manager.num_held == 0
        oracles = {(family, False): random_model(family) for family in WINDOWS}
        oracles |= {(family, True): merged_model(family, 2, ATTENTION) for family in WINDOWS}
        for (_, family, has_adapter, prompt), sequence in zip(asked, sequences, strict=True):
            assert sequence.output == likeliest(oracles[family, has_adapter], prompt, sequence.output)
    counters = scheduler.counters
    assert counters.cached_tokens > 0
    assert every > 1 or counters.swapped_in > 0
