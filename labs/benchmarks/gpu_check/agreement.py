"""Greedy tokens in fp32 on the device beside transformers', or the reference's on a CPU if it is not installed; and a
16-bit model's logits for the same tokens.

Sums in another order differ in their last digits. So answers may part where the oracle's two most likely tokens are
nearer than that; later tokens cannot be compared.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from backend.config import EngineOptions
from backend.kernels.reference import ReferenceOps
from backend.llm import OfflineEngine
from backend.model.decoder import Decoder
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.paged_kv.kv_cache import KVCache
from backend.placement import place_model
from backend.sampling_params import SamplingParams
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.sizing import ModelDemand, size_engine
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import TINY, write_checkpoint

NUM_TOKENS = 64
NEAR_TIE_LOGITS = 1e-4  # of a logit, between two tokens of which either may be chosen
PROMPTS = [[(31 * n + 7 * k) % TINY.vocab_size for k in range(3 + 11 * n)] for n in range(8)]
OPTIONS = EngineOptions(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, kv_memory_bytes=2**24)
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=2)


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, and how much likelier each was than the next best."""

    tokens: list[int]
    gaps: list[float]


def check(device: torch.device) -> Iterator[Finding]:
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        write_checkpoint(TINY, checkpoint, torch.device("cpu"))
        found = _answers(_runner(checkpoint, device, torch.float32))
        reference = _reference_runner(checkpoint)
        if importlib.util.find_spec("transformers"):
            oracle, expected = "transformers", _by_transformers(checkpoint)
        else:
            oracle, expected = "our reference on the CPU", _answers(reference)
        parted = [_parted(one, other.tokens) for one, other in zip(expected, found, strict=True)]
        wrong = sum(gap is not None and gap >= NEAR_TIE_LOGITS for gap in parted)
        yield Finding(f"answers that part from those of {oracle}, fp32", wrong, bound=0, exact=True)
        yield Finding(
            "answers that part at a near tie", sum(gap is not None and gap < NEAR_TIE_LOGITS for gap in parted)
        )
        texts = [prompt + answer.tokens for prompt, answer in zip(PROMPTS, expected, strict=True)]
        exactly, rounded = _scores(reference, texts), _scores(_runner(checkpoint, device, torch.bfloat16), texts)
        differences = [abs(one - other) for one, other in zip(exactly, rounded, strict=True)]
        what = "log probability of a token, bf16 beside the fp32 reference: difference"
        yield Finding(what, sum(differences) / len(differences), bound=0.02, exact=True)


def _parted(expected: Answer, tokens: list[int]) -> float | None:
    """Return the gap of two tokens at the place where the answer departs from the oracle's; None if it does not."""
    pairs = zip(expected.tokens, tokens, expected.gaps, strict=True)
    return next((gap for one, other, gap in pairs if one != other), None)


def _runner(checkpoint: Path, device: torch.device, dtype: torch.dtype) -> ModelRunner:
    config = read_model_config(checkpoint)
    weights = load_weights(checkpoint, config, dtype, device)
    runner = place_model(ModelDemand(OPTIONS, config, dtype), weights, device)
    runner.warm_up()
    return runner


def _reference_runner(checkpoint: Path) -> ModelRunner:
    config = read_model_config(checkpoint)
    engine = size_engine(ModelDemand(OPTIONS, config, torch.float32), 2**30)
    decoder = Decoder(config, load_weights(checkpoint, config, torch.float32), ReferenceOps(), engine.max_model_len)
    kv = KVCache(config, engine.num_blocks, engine.block_size, torch.float32, torch.device("cpu"))
    return ModelRunner(decoder, kv, engine)


def _answers(runner: ModelRunner) -> list[Answer]:
    answers = []
    for sequence in _completed(runner, PROMPTS, GREEDY, NUM_TOKENS):
        assert sequence.logprobs is not None
        gaps = [known.logprobs[0] - known.logprobs[1] for known in sequence.logprobs]
        answers.append(Answer(sequence.output, gaps))
    return answers


def _scores(runner: ModelRunner, texts: list[list[int]]) -> list[float]:
    """The log probability of every token of every text but its first."""
    scores: list[float] = []
    for sequence in _completed(runner, texts, SamplingParams(temperature=0, prompt_logprobs=0), 1):
        assert sequence.prompt_logprobs is not None
        scores += [known.logprob for known in sequence.prompt_logprobs]
    return scores


def _completed(
    runner: ModelRunner, prompts: list[list[int]], sampling: SamplingParams, num_tokens: int
) -> list[Sequence]:
    scheduler = Scheduler(runner.config, FirstComeFirstServed())
    sequences = [
        Sequence(PromptRequest(str(number), "", prompt, sampling, num_tokens, 0, frozenset()), float(number))
        for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    loop = OfflineEngine(scheduler, runner)
    while scheduler.has_work:
        loop.step()
    return sequences


def _by_transformers(checkpoint: Path) -> list[Answer]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - not everywhere

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    how = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    answers = []
    for prompt in PROMPTS:
        made = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, **how)
        best = torch.cat(made.logits).topk(2).values
        answers.append(Answer(made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return answers
