"""Configs of the families with experts, sinks, windows and MXFP4, with fields that nobody would write."""

import json
import re
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.config import EngineOptions
from backend.errors import BackendError
from backend.model.model_config import ModelConfig, read_model_config
from backend.model.weights import empty_weights
from backend.roofline import Footprint
from backend.sizing import ModelDemand, size_engine
from tests.backend.families import FAMILIES
from tests.examples import examples

NAMES = {"gemma3": "Gemma3ForCausalLM", "gpt-oss": "GptOssForCausalLM", "qwen3-moe": "Qwen3MoeForCausalLM"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
WHOLE = (0, -1, 1, 2, 3, 2**31, 2**63, 10**400)
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, False, *WHOLE, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x", "1", [], {}),
        *(["sliding_attention"], ["full_attention"] * 3, [None], [-1, 0, 1], [{}], {"rope_type": "yarn", "factor": -1}),
        *({"rope_type": 3}, {"rope_theta": "x"}, {"quant_method": 4}),
    ]
)


@cache
def configs() -> dict[str, dict[str, Any]]:
    found = {}
    for family, name in NAMES.items():
        config = FAMILIES[family]().to_dict() | {"architectures": [name]}
        found[family] = json.loads(json.dumps(config, default=str))
    return found | {"gpt-oss in MXFP4": found["gpt-oss"] | {"quantization_config": MXFP4}}


def use(config: ModelConfig) -> None:
    """Do with a config what is done before weights are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backend.sizing.free_memory", lambda: 2**40)
        engine = size_engine(ModelDemand(EngineOptions(max_model_len=None), config, torch.bfloat16), 2**40)
    assert engine.kv_blocks(engine.max_model_len) <= engine.num_blocks
    assert Footprint(config, "bfloat16").kv_bytes(4096) > 0
    if config.num_layers < 100 and config.vocab_size * config.hidden_size < 2**40:
        empty_weights(config, torch.bfloat16, torch.device("meta"))


@settings(max_examples=examples(40, at_night=5000), deadline=None)
@given(
    st.sampled_from([*NAMES, "gpt-oss in MXFP4"]),
    st.dictionaries(st.integers(0, 200), st.just("absent") | ODD, min_size=1, max_size=3),
)
def test_an_odd_config_is_read_or_refused_by_its_file_and_field(
    tmp_path_factory: pytest.TempPathFactory, family: str, changes: dict[int, Any]
) -> None:
    config = dict(configs()[family])
    keys = sorted(config)
    for number, value in changes.items():
        key = keys[number % len(keys)]
        inner = config[key]
        if isinstance(inner, dict) and inner and number % 3:  # a field of its own
            config[key] = inner | {sorted(inner)[number % len(inner)]: value}
        elif value == "absent":
            config.pop(key, None)
            keys = sorted(config)
        else:
            config[key] = value
    folder = tmp_path_factory.getbasetemp() / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    refused: list[str] = []
    try:
        read = read_model_config(folder)
    except BackendError as error:
        refused.append(str(error))
    if refused:
        assert "config" in refused[0], "the file is named"
        inner = [key for value in config.values() if isinstance(value, dict) for key in value]
        names = (*configs()[family], *inner)
        assert re.search(r"config\.json: \S+ is ", refused[0]) or any(key in refused[0] for key in names), "and a field"
        return
    with suppress(BackendError):
        use(read)
