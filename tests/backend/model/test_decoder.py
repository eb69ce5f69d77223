import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from backend.model.decoder import rope_table
from backend.model.model_config import read_model_config

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
