"""What adapters cost, and whether a token is ever another adapter's: `python -m labs.benchmarks.adapters`.

Cost: steps of 32 decodes with 32 adapters of all products, beside the same steps without, in turns; the model has
random weights. Isolation: 64 adapters of 8 tenants, in memory for a few, are loaded, replaced and unloaded at random
while requests of two classes come, are cancelled, preempted and swapped; each text is compared with that of its adapter
alone.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from backend import LLM, SamplingParams
from backend.calibration_steps import CalibrationStep
from backend.config import EngineOptions
from backend.model.adapter_checkpoint import AdapterWeights, random_adapter
from backend.model.known_shapes import LLAMA_32M
from backend.model.model_config import ModelConfig
from backend.model.weights import random_weights
from backend.paged_kv.block_names import adapter_salt
from backend.placement import place_model
from backend.scheduler.sequence import FinishReason, PromptRequest
from backend.scheduler.sequence import Sequence as Running
from backend.sizing import ModelDemand
from backend.worker.calibration import batch_of
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.memory import MIB
from labs.benchmarks.report import Report, Spread, scenario_parser

SMOLLM2 = replace(
    LLAMA_32M,
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)
LLAMA_1B = replace(
    LLAMA_32M, vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=4, num_heads=32, num_kv_heads=8
)
"""Four of the sixteen layers of Llama-3.2-1B, with the whole vocabulary."""

MODELS = {"32 M": LLAMA_32M, "SmolLM2-135M": SMOLLM2, "1 B, 4 layers": LLAMA_1B}
ROWS, CONTEXT = 32, 64
FEWEST_STEPS = 5
MOST_COST = 1.15  # of a step with adapters, in steps without
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def products(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """The products of every layer: the name of the module, its inputs and its outputs."""
    hidden, between = model.hidden_size, model.intermediate_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for layer in range(model.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        yield f"{attention}.q_proj", hidden, query
        yield f"{attention}.k_proj", hidden, key
        yield f"{attention}.v_proj", hidden, key
        yield f"{attention}.o_proj", query, hidden
        yield f"{mlp}.gate_proj", hidden, between
        yield f"{mlp}.up_proj", hidden, between
        yield f"{mlp}.down_proj", between, hidden


def adapter_tensors(
    model: ModelConfig, rank: int, modules: Sequence[str] = MODULES, seed: int = 1, strength: float = 0.5
) -> dict[str, Tensor]:
    """A and B of each product by PEFT's names, random, and strong enough to change most tokens."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, inputs, outputs in products(model):
        if name.split(".")[-1] in modules:
            a = torch.randn((rank, inputs), generator=generator)
            b = torch.randn((outputs, rank), generator=generator) * (strength / (inputs * rank) ** 0.5)
            tensors |= {f"base_model.model.{name}.lora_{which}.weight": one for which, one in (("A", a), ("B", b))}
    return tensors


def save_adapter(directory: Path, tensors: dict[str, Tensor], rank: int, **keys: object) -> Path:
    """Write an adapter as PEFT does, with `keys` in its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": [*MODULES]}
    (directory / "adapter_config.json").write_text(json.dumps(config | keys))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


# isolation

TENANTS, ADAPTERS, VERSIONS, PROMPTS = 8, 64, 2, 4
OPTIONS = EngineOptions(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=112,
    block_size=4,
    kv_memory_bytes=1536 * 1024,
    swap_space_bytes=256 * 1024,
    max_adapter_rank=4,
)


@dataclass
class Asked:
    """A request of the storm, and the version of the weights that its adapter had when it came."""

    sequence: Running
    name: str | None
    version: int
    prompt: int


@dataclass
class Storm:
    """Drives an engine at random; `wrong` counts tokens that are not those of the request's adapter alone."""

    directory: Path
    seed: int
    model: str = "embedded"
    asked: list[Asked] = field(default_factory=list)
    tokens: int = 0
    wrong: int = 0
    loads: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.llm, self.alone = LLM(self.model, OPTIONS), LLM(self.model, replace(OPTIONS, kv_memory_bytes=32 * MIB))
        generator = Random(1)
        start = [generator.randrange(2, 1000) for _ in range(24)]
        self.prompts = [start + [generator.randrange(2, 1000) for _ in range(1 + 9 * n)] for n in range(PROMPTS)]
        self.weights: dict[tuple[str, int], AdapterWeights] = {}
        self.versions: dict[str, int] = {}
        self.expected: dict[tuple[str | None, int, int], list[int]] = {}
        self.names = self.llm.model.block_names(b"storm")
        self.llm.scheduler.name_blocks_by(self.names)

    def name(self, number: int) -> str:
        return f"tenant{number % TENANTS}-adapter{number // TENANTS}"

    def load(self, name: str, version: int) -> None:
        """Load an adapter, in the place of one of the same name."""
        weights = self.weights.get((name, version))
        if weights is None:
            number = int(name.split("adapter")[1]) * TENANTS + int(name[len("tenant")])
            rank, modules = 1 + number % 4, MODULES if number % 3 == 0 else MODULES[: 1 + number % 5]
            tensors = adapter_tensors(self.llm.model.config, rank, modules, 1000 * version + number, strength=2.0)
            path = save_adapter(self.directory / f"{name}-{version}", tensors, rank)
            weights = self.weights[name, version] = self.llm.adapters.read(path)
        self.llm.adapters.add(name, self.directory, weights)
        self.versions[name] = version
        self.loads += 1

    def step(self) -> None:
        """Let a few things happen, and compute a step."""
        draw = self.random.random
        if draw() < 0.3:
            self.load(self.name(self.random.randrange(ADAPTERS)), self.random.randrange(VERSIONS))
        if draw() < 0.05 and self.versions:
            name = self.random.choice([*self.versions])
            self.llm.adapters.remove(name)
            del self.versions[name]
        if draw() < 0.5 and len(self.asked) < 24:
            self.ask()
        if draw() < 0.05 and self.asked:
            one = self.random.choice(self.asked)
            self.llm.scheduler.finish_sequence(one.sequence, FinishReason.CANCELLED)
            self.cancelled += 1
            self.judge(one)
        if self.llm.scheduler.has_work:
            self.llm.step()
        for one in [one for one in self.asked if one.sequence.finish_reason is not None]:
            self.judge(one)

    def ask(self) -> None:
        known = [*self.versions]
        name = self.random.choice(known) if known and self.random.random() < 0.9 else None
        tenant = "tenant0" if name is None else name.split("-")[0]
        prompt, adapter = self.random.randrange(PROMPTS), None if name is None else self.llm.adapters.get(name)
        request = PromptRequest(
            id=f"{len(self.expected)}-{self.tokens}-{self.random.getrandbits(40)}",
            tenant=tenant,
            prompt=self.prompts[prompt],
            sampling=SamplingParams(temperature=0, ignore_eos=True),
            max_tokens=self.random.randrange(4, 40),
            seed=0,
            end_tokens=frozenset(),
            priority_class=self.random.randrange(2),
            adapter=adapter,
        )
        sequence = Running(request, arrival=float(self.tokens))
        sequence.cache_root = self.names.root(tenant, *adapter_salt(None if adapter is None else adapter.digest))
        self.names.name(sequence, sequence.num_prompt_tokens // OPTIONS.block_size)
        self.llm.scheduler.add(sequence)
        self.asked.append(Asked(sequence, name, self.versions.get(name or "", 0), prompt))

    def judge(self, one: Asked) -> None:
        """Compare a request's text with that of its adapter alone."""
        self.asked.remove(one)
        output, key = one.sequence.output, (one.name, one.version, one.prompt)
        if output and key not in self.expected:
            if one.name is not None:
                self.alone.adapters.add(one.name, self.directory, self.weights[one.name, one.version])
            sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
            (answer,) = self.alone.generate([self.prompts[one.prompt]], sampling, False, False, [one.name])
            self.expected[key] = answer.token_ids
        expected = self.expected.get(key, [])
        self.tokens += len(output)
        self.wrong += sum(found != right for found, right in zip(output, expected, strict=False))

    @property
    def distinct(self) -> float:
        """The share of texts of adapters that differ from all others to the same prompt."""
        texts = [(key[2], tuple(text)) for key, text in self.expected.items()]
        return len(set(texts)) / max(1, len(texts))


def isolation(report: Report, tokens: int, seed: int) -> None:
    with TemporaryDirectory() as directory:
        storm, began = Storm(Path(directory), seed), time.perf_counter()
        while storm.tokens < tokens:
            storm.step()
        counters, cache = storm.llm.scheduler.counters, storm.llm.scheduler.kv_manager.cache
    row: dict[str, object] = {
        "tokens": storm.tokens,
        "texts": len(storm.expected),
        "distinct": round(storm.distinct, 3),
        "loads": storm.loads,
        "cancelled": storm.cancelled,
        "preemptions": counters.preemptions,
        "swapped in": counters.swapped_in,
        "evicted blocks": cache.evictions,
        "seconds": round(time.perf_counter() - began),
    }
    report.add_table("isolation", [row])
    report.at_most("tokens of another's adapter", storm.wrong, 0)
    report.at_least("share of texts that tell their adapter", storm.distinct, 0.9)
    report.at_least("preemptions", counters.preemptions, 1)


# cost


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds of steps with an adapter for each row and without, in turns, and the bytes of an adapter."""

    slow: list[float]
    fast: list[float]
    adapter_bytes: int

    @property
    def ratio(self) -> float:
        """The median of the ratios of neighbours."""
        return Spread.of([a / b for a, b in zip(self.slow, self.fast, strict=True)]).median


def measure_steps(runner: ModelRunner, rank: int, seconds: float) -> Steps:
    """Measure decodes in all slots of a runner that serves adapters of this rank, for about `seconds`."""
    tables, config, model = runner.adapters, runner.config, runner.decoder.config
    assert tables is not None
    rows, own = config.max_num_seqs, config.blocks_for(CONTEXT)
    adapters = [random_adapter(model, tables.dtype, rank, rank, tables.block_numbers, seed) for seed in range(2)]
    size, places = len(adapters[0].blocks), []
    for row in range(rows):
        tables.add(1 + row, adapters[row % 2])
        places.append((1 + row, [rows * own + row * size + index for index in range(size)]))
    step, num_blocks = CalibrationStep(rows, CONTEXT), rows * own
    with_adapters, without = batch_of(step, config, num_blocks, places), batch_of(step, config, num_blocks)
    brought = [(number, index, block) for number, where in places for index, block in enumerate(where)]
    runner.launch(replace(with_adapters, adapter_blocks=brought)).wait()
    slow, fast, until = list[float](), list[float](), time.perf_counter() + seconds
    while len(slow) < FEWEST_STEPS or time.perf_counter() < until:
        slow.append(1000 * runner.launch(with_adapters).wait().elapsed)
        fast.append(1000 * runner.launch(without).wait().elapsed)
    return Steps(slow, fast, adapters[0].blocks.nbytes)


def cost(name: str, dtype: torch.dtype, rank: int, seconds: float) -> dict[str, object]:
    """Steps on this machine's CPU."""
    options = EngineOptions(max_num_seqs=ROWS, max_model_len=256, max_adapter_rank=rank, kv_memory_bytes=3 << 30)
    weights = random_weights(MODELS[name], dtype)
    found = measure_steps(
        place_model(ModelDemand(options, MODELS[name], dtype), weights, torch.device("cpu")), rank, seconds
    )
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "rank": rank,
        "adapter MiB": round(found.adapter_bytes / MIB, 1),
        "without, ms": Spread.of(found.fast),
        "with 32, ms": Spread.of(found.slow),
        "best/best": min(found.slow) / min(found.fast),
        "ratio": found.ratio,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the search for a token of another's adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of the cost")
    parser.add_argument("--part", choices=("all", "cost", "isolation"), default="all")
    options = parser.parse_args(arguments)
    report = Report("adapters", options.quick)
    if options.part != "isolation":
        shapes = [("32 M", 8)] if options.quick else [(name, rank) for name in MODELS for rank in (8, 16)]
        seconds = 0.1 if options.quick else options.seconds
        rows = [cost(name, dtype, rank, seconds) for name, rank in shapes for dtype in (torch.float32, torch.bfloat16)]
        report.add_table("a step of 32 decodes, each with an adapter of its own", rows)
        report.at_most("the largest median ratio", max(float(str(row["ratio"])) for row in rows), MOST_COST)
    if options.part != "cost":
        isolation(report, 300 if options.quick else options.tokens, options.seed)
    return report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
