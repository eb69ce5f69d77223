"""Greedy tokens on the device against transformers', or, where it is not installed, against our reference on a CPU."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from backend.kernels.reference import ReferenceOps
from backend.llm import OfflineEngine
from backend.model.decoder import Decoder
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.paged_kv.kv_cache import KVCache
from backend.placement import place_model
from backend.sampling_params import SamplingParams
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed, HoldingQueue
from backend.sizing import EngineOptions, size_engine
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import TINY, write_checkpoint

NUM_TOKENS = 64
PROMPTS = [[(31 * n + 7 * k) % TINY.vocab_size for k in range(3 + 11 * n)] for n in range(8)]
OPTIONS = EngineOptions(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, kv_memory_bytes=2**24)


def check(device: torch.device) -> Iterator[Finding]:
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        write_checkpoint(TINY, checkpoint, torch.device("cpu"))
        found = _tokens(_runner(checkpoint, device))
        if importlib.util.find_spec("transformers"):
            oracle, expected = "transformers", _by_transformers(checkpoint)
        else:
            oracle, expected = "our reference on the CPU", _tokens(_reference_runner(checkpoint))
    equal = sum(a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))
    share = equal / (len(PROMPTS) * NUM_TOKENS)
    yield Finding(f"greedy tokens equal to those of {oracle}, fp32", share, bound=1.0, sense=">=", exact=True)


def _runner(checkpoint: Path, device: torch.device) -> ModelRunner:
    config = read_model_config(checkpoint)
    weights = load_weights(checkpoint, config, torch.float32, device)
    runner = place_model(config, OPTIONS, weights, torch.float32, device)
    runner.warm_up()
    return runner


def _reference_runner(checkpoint: Path) -> ModelRunner:
    config = read_model_config(checkpoint)
    engine = size_engine(OPTIONS, config, torch.float32, 2**30)
    decoder = Decoder(config, load_weights(checkpoint, config, torch.float32), ReferenceOps(), engine.max_model_len)
    kv = KVCache(config, engine.num_blocks, engine.block_size, torch.float32, torch.device("cpu"))
    return ModelRunner(decoder, kv, engine)


def _tokens(runner: ModelRunner) -> list[list[int]]:
    scheduler = Scheduler(runner.config, HoldingQueue(FirstComeFirstServed()))
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    sequences = [
        Sequence(str(number), "", prompt, greedy, NUM_TOKENS, 0, frozenset(), float(number))
        for number, prompt in enumerate(PROMPTS)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    loop = OfflineEngine(scheduler, runner)
    while scheduler.has_work:
        loop.step()
    return [sequence.output for sequence in sequences]


def _by_transformers(checkpoint: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - not everywhere

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]
