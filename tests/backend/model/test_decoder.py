"""transformers is the oracle: what it computes from a checkpoint, the paged decoder computes from the same files."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from backend.errors import ModelLoadError
from backend.kernels.build import load_library
from backend.kernels.cpu import CpuOps
from backend.kernels.ops import Ops
from backend.kernels.reference import ReferenceOps
from backend.kernels.torch_ops import TorchOps
from backend.model.decoder import Decoder, rope_table
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.placement import select_dtype
from tests.backend.families import FAMILIES, likeliest, random_model
from tests.backend.paged_batch import PagedBatch
from tests.examples import examples

PROMPT_LENGTHS = (1, 11, 23, 40)
NUM_TOKENS = examples(16, at_night=32)
AT_NIGHT = [pytest.param(ops, marks=pytest.mark.nightly) for ops in ("reference", "torch")]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["reference", "torch", "cpu"])
def ops(request: pytest.FixtureRequest, saved: Path) -> Ops:
    if request.param != "cpu":
        return ReferenceOps() if request.param == "reference" else TorchOps()
    library = load_library(wait=True)
    if library is None:
        pytest.skip("no C++ compiler")
    cpu, config = CpuOps(library), read_model_config(saved)
    if not cpu.supports(torch.float32, config.num_heads, config.num_kv_heads, config.head_dim):
        pytest.skip(f"no C++ attention for heads of {config.head_dim}")
    return cpu


@cache
def oracle(family: str) -> PreTrainedModel:
    return random_model(family)


@cache
def prompts(family: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    vocab = oracle(family).config.vocab_size
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([prompt])).logits
    return logits[0].float()


def decoder(directory: Path, ops: Ops, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_model_config(directory)
    return Decoder(config, load_weights(directory, config, dtype), ops, max_position=128)


def decoded(directory: Path, prompt: list[int], ops: Ops | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of all of the prompt's tokens in one step."""
    return PagedBatch(decoder(directory, ops or ReferenceOps(), dtype), [prompt]).step({0: len(prompt)})


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def saved(family: str, tmp_path: Path) -> Path:
    oracle(family).save_pretrained(tmp_path)
    return tmp_path


def test_prefill_logits_are_those_of_transformers(family: str, saved: Path, ops: Ops) -> None:
    prompt = prompts(family)[-1]
    logits = decoded(saved, prompt, ops)
    assert logits.dtype == torch.float32
    assert_close(logits, oracle_logits(oracle(family), prompt))


@pytest.mark.parametrize("ops", [*AT_NIGHT, "cpu"], indirect=True)
def test_greedy_tokens_of_a_sequence_alone_are_those_of_transformers(family: str, saved: Path, ops: Ops) -> None:
    prompt = prompts(family)[-1]
    (found,) = PagedBatch(decoder(saved, ops), [prompt], block_size=16).greedy(NUM_TOKENS, chunk=1000, starts=[0])
    assert found == likeliest(oracle(family), prompt, found)


@pytest.mark.parametrize("ops", [AT_NIGHT[0], "torch", "cpu"], indirect=True)
def test_greedy_tokens_in_a_mixed_batch_with_chunked_prefill_are_those_of_transformers(
    family: str, saved: Path, ops: Ops
) -> None:
    found = PagedBatch(decoder(saved, ops), prompts(family)).greedy(NUM_TOKENS, chunk=5, starts=[3, 0, 9, 30])
    expected = [likeliest(oracle(family), *each) for each in zip(prompts(family), found, strict=True)]
    assert found == expected


def test_shards_load_like_a_single_file(tmp_path: Path) -> None:
    oracle("qwen3-biases-tied").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = prompts("qwen3-biases-tied")[-1]
    assert_close(decoded(tmp_path, prompt), oracle_logits(oracle("qwen3-biases-tied"), prompt))


def without_prefix(model: PreTrainedModel, directory: Path) -> None:
    """As a base model is saved, with the output matrix where it is a matrix of its own."""
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in stored.items()}, directory / "model.safetensors")


def base_alone(model: PreTrainedModel, directory: Path) -> None:
    model.base_model.save_pretrained(directory)
    assert not any(name.startswith("model.") for name in load_file(directory / "model.safetensors"))


@pytest.mark.parametrize(
    ("family", "save"),
    [("qwen3-biases-tied", without_prefix), ("qwen2", without_prefix), ("llama-gqa-tied", base_alone)],
)
def test_a_base_model_that_was_saved_by_itself_is_served(
    family: str, save: Callable[[PreTrainedModel, Path], None], tmp_path: Path
) -> None:
    save(oracle(family), tmp_path)
    prompt = prompts(family)[-1]
    expected = oracle_logits(AutoModelForCausalLM.from_pretrained(tmp_path), prompt)
    torch.testing.assert_close(expected, oracle_logits(oracle(family), prompt))
    assert_close(decoded(tmp_path, prompt), expected)


def test_a_base_model_without_an_output_matrix_is_refused(tmp_path: Path) -> None:
    base_alone(oracle("qwen2"), tmp_path)
    with pytest.raises(ModelLoadError, match=r'lacks lm_head\.weight.* set "tie_word_embeddings": true'):
        decoder(tmp_path, ReferenceOps())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_a_type_that_the_config_does_not_name_is_that_of_the_weights(
    dtype: torch.dtype, shard_size: str, tmp_path: Path
) -> None:
    random_model("llama2").to(dtype).save_pretrained(tmp_path, max_shard_size=shard_size)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "dtype"}))
    config = read_model_config(tmp_path)
    assert config.dtype_said_by == "weights"
    assert select_dtype("auto", config, torch.device("cuda")) is dtype
    assert select_dtype("auto", config, torch.device("cpu")) is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_checkpoints_served_in_fp32_keep_their_stored_values(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    random_model(family).to(dtype).save_pretrained(tmp_path)
    prompt = prompts(family)[1]
    expected = oracle_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), prompt)
    assert read_model_config(tmp_path).torch_dtype == str(dtype).removeprefix("torch.")
    assert_close(decoded(tmp_path, prompt), expected)


@pytest.mark.parametrize("ops", [*AT_NIGHT, "cpu"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_fp32_as_transformers_is(
    family: str, dtype: torch.dtype, saved: Path, ops: Ops
) -> None:
    prompt = prompts(family)[2]
    rounded = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    if read_model_config(saved).experts is None:
        exact, half = oracle_logits(oracle(family), prompt), oracle_logits(rounded, prompt)
        assert (decoded(saved, prompt, ops, dtype) - exact).square().mean() <= 2 * (half - exact).square().mean()
        return
    # a token between two experts has either's result, and what is behind it another: after a few tokens most are near
    contexts = [prompt[max(0, end - 12) : end] for end in range(1, len(prompt) + 1)]
    lengths = torch.tensor([len(context) for context in contexts])
    rows = PagedBatch(decoder(saved, ops, dtype), contexts).step(dict(enumerate(lengths.tolist())))
    found = rows[lengths.cumsum(0) - 1]
    exact, half = (
        torch.stack([oracle_logits(one, each)[-1] for each in contexts]) for one in (oracle(family), rounded)
    )
    ours, theirs = ((logits - exact).square().mean(-1).median() for logits in (found, half))
    assert ours <= 2 * theirs


# tables of rotary embedding

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "eos_token_id": [128001, 128009],
    "rope_theta": 500000.0,
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_2_5 = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "none": None,
    "llama 3.1": LLAMA_3_1,
    "llama 3.2": LLAMA_3_1 | {"factor": 32.0},
    "qwen 2.5 yarn": QWEN_2_5,
    "yarn, truncate null": QWEN_2_5 | {"truncate": None},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.filterwarnings("ignore")
def test_tables_of_published_configs_are_bit_for_bit_those_of_transformers(
    scaling: dict[str, object] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_scaling": scaling}))
    positions = torch.tensor([[0, 1, 2, 77, 4095, 8191, 8192, 32767, 32768, 99_999, 131_071]])
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    cos, sin = rotary(torch.zeros(1), positions)  # [1, positions, head_dim], each half twice
    table = rope_table(read_model_config(tmp_path), 131_072)[positions[0]]
    assert torch.equal(table, torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1))
