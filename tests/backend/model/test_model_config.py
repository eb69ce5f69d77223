import json
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ModelLoadError
from backend.model.model_config import (
    ExpertsConfig,
    ModelConfig,
    RopeScaling,
    read_model_config,
    read_sampling_defaults,
)


def write(directory: Path, **values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_a_checkpoint_without_the_file_sets_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


def test_sampling_values_become_defaults_and_the_rest_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=20, eos_token_id=[1, 2], max_length=77)
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_do_sample_false_makes_greedy_the_default(tmp_path: Path) -> None:
    assert read_sampling_defaults(write(tmp_path, do_sample=False)) == {"temperature": 0.0}


def test_greedy_by_default_keeps_the_repetition_penalty_and_no_more(tmp_path: Path) -> None:
    write(tmp_path, do_sample=False, temperature=0.6, top_p=0.9, repetition_penalty=1.3)
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.0, "repetition_penalty": 1.3}


@pytest.mark.parametrize("value", [-1, "warm", float("nan")])
def test_a_value_that_nobody_may_ask_for_is_refused_by_file_and_key(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config.json: temperature is"):
        read_sampling_defaults(write(tmp_path, temperature=value))


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
GEMMA = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "sliding_window_pattern": 3}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}


def read(directory: Path, config: dict[str, Any], generation: object = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(directory)


def test_a_plain_llama_is_read_whole(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        max_position=512,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        sliding_window=None,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_null_and_absent_keys_take_their_defaults(tmp_path: Path) -> None:
    absent = {"num_key_value_heads", "bos_token_id", "eos_token_id", "torch_dtype", "rms_norm_eps"}
    config = read(tmp_path, {key: value for key, value in LLAMA.items() if key not in absent})
    assert config == read(tmp_path, LLAMA | dict.fromkeys(absent) | {"head_dim": None, "rope_scaling": None})
    assert (config.num_kv_heads, config.eos_token_ids, config.torch_dtype) == (8, (), "float32")


def test_a_config_may_leave_out_facts_that_its_architecture_implies(tmp_path: Path) -> None:
    qwen2, qwen3 = read(tmp_path, QWEN2), read(tmp_path, QWEN3)
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


def test_experts_have_a_width_and_a_number_of_their_own(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_MOE | {"norm_topk_prob": True})
    assert (config.intermediate_size, config.experts) == (32, ExpertsConfig(16, 4, normalises=True))
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 16}
    assert read(tmp_path, newer).experts == ExpertsConfig(16, 4, normalises=False)


def test_gemma_turns_layers_with_a_window_by_a_base_of_their_own(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(tmp_path, GEMMA | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling})
    kinds = {"full_attention": scaling | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    assert read(tmp_path, GEMMA | {"rope_parameters": kinds}) == old
    assert (old.rope_theta, old.local_rope_theta, old.max_position) == (5e5, 2e4, 512)
    assert [old.window(layer) for layer in range(4)] == [32, 32, None, 32]
    plain = read(tmp_path, GEMMA | {"layer_types": ["sliding_attention"] * 4})
    assert (plain.rope_theta, plain.local_rope_theta, plain.full_attention_layers) == (1e6, 1e4, frozenset())
    assert plain.tie_word_embeddings and plain.head_dim == 256 and plain.attention_scale == 1 / 16


def test_gpt_oss_has_sinks_biases_and_a_window_on_every_other_layer(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS | {"swiglu_limit": 5})
    assert config.experts == ExpertsConfig(16, 4, normalises=True, clamp=(1.702, 5.0))
    assert config.sinks and config.attention_bias and config.output_bias
    assert [config.window(layer) for layer in range(4)] == [128, None, 128, None]
    assert (config.head_dim, config.rope_theta, config.max_position) == (64, 150_000, 512)


def test_old_and_new_rope_keys_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read(tmp_path, LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = read(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)


def test_rope_keys_that_contradict_each_other_are_refused_and_not_skipped(tmp_path: Path) -> None:
    """As where a scaling is written into a checkpoint that has its base in the new place."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    with pytest.raises(ModelLoadError, match=r"rope_scaling is .*; rope_parameters says otherwise"):
        read(tmp_path, LLAMA | {"rope_scaling": yarn, "rope_parameters": {"rope_theta": 1e6}})
    both = yarn | {"rope_theta": 1e6}
    assert read(tmp_path, LLAMA | {"rope_scaling": both, "rope_parameters": both}).rope_theta == 1e6


@pytest.mark.parametrize(
    ("scaling", "max_position"),
    [
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "default"}, 512),
    ],
)
def test_the_context_follows_the_scaling(scaling: dict[str, Any], max_position: int, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"rope_scaling": scaling}).max_position == max_position


@pytest.mark.parametrize(("said", "truncate"), [({}, True), ({"truncate": None}, False), ({"truncate": False}, False)])
def test_a_null_truncate_is_false_as_in_transformers(said: dict[str, Any], truncate: bool, tmp_path: Path) -> None:
    scaling = read(tmp_path, LLAMA | {"rope_scaling": YARN | said}).rope_scaling
    assert scaling is not None and scaling.truncate is truncate


def test_mistral_has_its_window_on_every_layer_unless_null(tmp_path: Path) -> None:
    config = read(tmp_path, MISTRAL | {"sliding_window": 32})
    assert [config.window(layer) for layer in range(4)] == [32] * 4
    assert read(tmp_path, MISTRAL | {"sliding_window": None}).window(0) is None


def test_a_window_that_is_not_mentioned_is_that_of_transformers(tmp_path: Path) -> None:
    assert read(tmp_path, MISTRAL).window(0) == 4096
    assert read(tmp_path, QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}).window(0) == 4096
    assert read(tmp_path, QWEN2).window(0) is None


def test_qwen_has_its_window_only_when_switched_on_and_from_max_window_layers(tmp_path: Path) -> None:
    keys = {"sliding_window": 32, "max_window_layers": 3}
    assert read(tmp_path, QWEN2 | keys).sliding_window is None
    config = read(tmp_path, QWEN2 | keys | {"use_sliding_window": True})
    assert [config.window(layer) for layer in range(4)] == [None, None, None, 32]


@pytest.mark.parametrize("family", [MISTRAL, QWEN2, QWEN3])
def test_layer_types_decide_which_layers_are_windowed(family: dict[str, Any], tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = read(tmp_path, family | {"sliding_window": 32, "use_sliding_window": True, "layer_types": types})
    assert [config.window(layer) for layer in range(4)] == [32, None, 32, None]


@pytest.mark.parametrize(
    ("generation", "eos"),
    [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (2,)), ({"eos_token_id": None}, (2,))],
)
def test_end_tokens_are_those_of_generation_config_where_it_names_any(
    generation: dict[str, Any], eos: tuple[int, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, LLAMA, generation).eos_token_ids == eos


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"]}, "architectures is ['GemmaForCausalLM']; one of Llama"),
        (LLAMA | {"architectures": None}, "architectures is None; one of LlamaForCausalLM"),
        (LLAMA | {"architectures": [{}]}, "architectures is [{}]; one of LlamaForCausalLM"),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; one of"),
        (LLAMA | {"model_type": "gemma"}, "model_type is 'gemma'; LlamaForCausalLM is a 'llama'; correct whichever"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts is 8; 0 is supported"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; 'silu' or 'swish' is supported"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; 1 is supported"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        (LLAMA | {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}"),
        (LLAMA | {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; default, linear"),
        (LLAMA | {"rope_scaling": {"type": ["linear"]}}, "rope_scaling.type is ['linear']; default, linear"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; a finite number"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0; a finite number"),
        (LLAMA | {"rope_scaling": 3}, "rope_scaling is 3; an object is expected"),
        (
            LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_scaling.high_freq_factor is 4; it must be above low_freq_factor 4.0",
        ),
        (LLAMA | {"rope_theta": 1}, "rope_theta is 1; a base above 1 is expected"),
        (LLAMA | {"rope_theta": "10000"}, "rope_theta is '10000'; a finite number"),
        (LLAMA | {"rope_theta": 10**400}, f"rope_theta is 1{'0' * 400}; a finite number"),
        (LLAMA | {"rope_scaling": YARN | {"beta_fast": 1e308}}, "rope_scaling.beta_fast is 1e+308; a finite number"),
        (LLAMA | {"rope_scaling": YARN | {"beta_slow": 5e-324}}, "rope_scaling.beta_slow is 5e-324; a finite number"),
        (LLAMA | {"rope_scaling": YARN | {"factor": 1e38}}, "its rope scaling makes a context of 2.56e+40 positions"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads 8"),
        (LLAMA | {"num_attention_heads": 6}, "num_attention_heads is 6; without head_dim it must divide hidden_size"),
        (LLAMA | {"head_dim": 7}, "head_dim is 7; rotary embedding needs an even one"),
        (LLAMA | {"vocab_size": None}, "vocab_size is None; an integer of at least 1"),
        (LLAMA | {"vocab_size": 2.5}, "vocab_size is 2.5; an integer of at least 1"),
        (LLAMA | {"vocab_size": 2**31}, "vocab_size is 2147483648; an integer of at least 1 and below 2,147,483,648"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0; an integer of at least 1"),
        (LLAMA | {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; an integer of at least 1 and below 4,0"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers is True; an integer of at least 1"),
        (LLAMA | {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; a finite number above 0"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; true or false"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; one of float32"),
        (LLAMA | {"dtype": "int8"}, "dtype is 'int8'; one of float32"),
        (LLAMA | {"bos_token_id": "<s>"}, "bos_token_id is '<s>'; an integer of at least 0"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; a token id or a list"),
        (LLAMA | {"eos_token_id": [2, -1]}, "eos_token_id is [2, -1]; a token id or a list"),
        (LLAMA | {"eos_token_id": 128}, "eos_token_id 128 lies outside the vocabulary of 128 tokens"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts is 0; an integer of at least 1 and below 32,769"),
        (QWEN3_MOE | {"num_experts": None}, "num_experts is None; an integer of at least 1"),
        (QWEN3_MOE | {"num_experts": 10**6}, "num_experts is 1000000; an integer of at least 1 and below 32,769"),
        (QWEN3_MOE | {"num_local_experts": 8}, "num_local_experts is 8; num_experts says 16: correct whichever"),
        (QWEN3_MOE | {"num_experts_per_tok": 17}, "num_experts_per_tok is 17; at most the 16 of num_experts"),
        (QWEN3_MOE | {"num_experts_per_tok": None}, "num_experts_per_tok is None; an integer of at least 1"),
        (QWEN3_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size is 0; an integer of at least 1"),
        (QWEN3_MOE | {"norm_topk_prob": "no"}, "norm_topk_prob is 'no'; true or false"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; 1 is supported"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers is [0]; [] is supported"),
        (QWEN3_MOE | {"use_sliding_window": True}, "use_sliding_window is True; False is supported"),
        (GEMMA | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; 'gelu_pytorch_tanh' is supported"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; only a model without it"),
        (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only a model without it"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; False is supported"),
        (GEMMA | {"sliding_window": None}, "sliding_window is None; an integer is expected"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; an integer of at least 1"),
        (GEMMA | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; an integer of at least 1"),
        (GEMMA | {"rope_local_base_freq": 1}, "rope_local_base_freq is 1; a base above 1"),
        (GEMMA | {"rope_parameters": {"sliding_attention": 3}}, "rope_parameters.sliding_attention is 3; an object"),
        (
            GEMMA | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.rope_type is 'linear'; default is supported",
        ),
        (GPT_OSS | {"rope_scaling": None}, "rope_scaling is None; an object is expected"),
        (GPT_OSS | {"swiglu_limit": -1}, "swiglu_limit is -1; a finite number above 0"),
        (GPT_OSS | {"num_experts_per_tok": 17}, "num_experts_per_tok is 17; at most the 16 of num_local_experts"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0; an integer of at least 1"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
            'layer_types is [\'full_attention\']; 4 times "full_attention" or "sliding_attention"',
        ),
        (
            MISTRAL | {"layer_types": [[], [], [], []]},
            'layer_types is [[], [], [], []]; 4 times "full_attention" or "sliding_attention"',
        ),
    ],
)
def test_an_unservable_config_is_refused_by_file_key_and_value(
    config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, config)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {complaint}")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "max_position_embeddings", "num_attention_heads"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json: {key} is missing; an integer"):
        read(tmp_path, {name: value for name, value in LLAMA.items() if name != key})


def test_a_bad_generation_config_is_refused_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id is 'end'"):
        read(tmp_path, LLAMA, {"eos_token_id": "end"})
