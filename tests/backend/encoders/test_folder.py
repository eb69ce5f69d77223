"""A folder that is not supported is refused by name, with what is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.encoders.encoder import load_encoder
from backend.encoders.folder import Kind
from backend.errors import ModelLoadError
from tests.backend.encoders.families import edit
from tests.backend.encoders.tiny import save_modules, save_tiny_encoder

Edit = Callable[[Path], None]
TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}


def config(**values: Any) -> Edit:
    return lambda folder: edit(folder / "config.json", **values)


def sentence(**values: Any) -> Edit:
    return lambda folder: edit(folder / "sentence_bert_config.json", **values)


def said(**values: Any) -> Edit:
    return lambda folder: edit(folder / "config_sentence_transformers.json", **values)


def pooling(**values: Any) -> Edit:
    return lambda folder: edit(folder / "1_Pooling" / "config.json", **values)


def modules(*kinds: str) -> Edit:
    return lambda folder: save_modules(folder, *kinds)


def module_list(value: object) -> Edit:
    def change(folder: Path) -> None:
        (folder / "modules.json").write_text(json.dumps(value))

    return change


def dense(**values: Any) -> Edit:
    def change(folder: Path) -> None:
        save_modules(folder, "Transformer", "Pooling", "Dense", pooling={"pooling_mode": "mean"})
        edit(folder / "2_Dense" / "config.json", **({"in_features": 32, "out_features": 8, "bias": False} | values))
        save_file({"linear.weight": torch.zeros(8, 32)}, folder / "2_Dense" / "model.safetensors")

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def changed(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return changed


def without(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


MALFORMED: dict[str, tuple[Edit, str]] = {
    "no config": (without("config.json"), "/config.json does not exist; a model directory needs it"),
    "no tokenizer": (
        without("tokenizer.json"),
        "/tokenizer.json: not found; save the fast tokenizer beside the weights",
    ),
    "no weights": (without("model.safetensors"), "holds neither model.safetensors nor model.safetensors.index.json"),
    "no name": (config(architectures=None), "/config.json: architectures is missing; a list of one name is expected"),
    "two names": (
        config(architectures=["BertModel", "BertForMaskedLM"]),
        "architectures is ['BertModel', 'BertForMaskedLM']; a list of one name is expected",
    ),
    "another family": (
        config(architectures=["T5EncoderModel"]),
        (
            "architectures is ['T5EncoderModel']; BertModel, RobertaModel, XLMRobertaModel, DistilBertModel, "
            "MPNetModel, their ForSequenceClassification, LlamaModel, MistralModel, Qwen2Model, Qwen3Model and their "
            "ForCausalLM are supported"
        ),
    ),
    "another head": (
        config(architectures=["BertForQuestionAnswering"]),
        "architectures is ['BertForQuestionAnswering']; ",
    ),
    "a family's name left out": (config(architectures=["Model"]), "architectures is ['Model']; "),
    "a decoder that scores": (
        config(architectures=["Qwen3ForSequenceClassification"]),
        "architectures is ['Qwen3ForSequenceClassification']; ",
    ),
    "code of its own": (
        config(auto_map={"AutoModel": "modeling.Model"}),
        "auto_map is {'AutoModel': 'modeling.Model'}; only a model without code of its own is supported",
    ),
    "relative positions": (
        config(position_embedding_type="relative_key"),
        "position_embedding_type is 'relative_key'; only 'absolute' is supported",
    ),
    "a decoder's attention": (config(is_decoder=True), "is_decoder is True; only False is supported"),
    "cross attention": (config(add_cross_attention=True), "add_cross_attention is True; only False is supported"),
    "quantised": (
        config(quantization_config={"bits": 8}),
        "quantization_config is {'bits': 8}; only a model without it is supported",
    ),
    "another activation": (
        config(hidden_act="swish"),
        "hidden_act is 'swish'; one of gelu, gelu_new, gelu_pytorch_tanh, relu is supported",
    ),
    "an activation that is no name": (config(hidden_act=["gelu"]), "hidden_act is ['gelu']; one of gelu, gelu_new, "),
    "heads": (config(num_attention_heads=5), "num_attention_heads is 5; it must divide hidden_size 32"),
    "too many layers": (
        config(num_hidden_layers=10**7),
        "num_hidden_layers is 10000000; an integer of at least 1 and below 4,096",
    ),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0; an integer of at least 1 and below"),
    "eps": (config(layer_norm_eps=-1), "layer_norm_eps is -1; a finite number above 0"),
    "a longer table of positions": (
        config(max_position_embeddings=512),
        "embeddings.position_embeddings.weight has shape [128, 32], but config.json calls for [512, 32]",
    ),
    "a shorter table of positions": (
        config(max_position_embeddings=64),
        "embeddings.position_embeddings.weight has shape [128, 32], but config.json calls for [64, 32]",
    ),
    "a smaller vocabulary": (
        config(vocab_size=20),
        "/tokenizer.json: the highest token id is 140, but the model has 20",
    ),
    "positions behind the padding": (
        config(architectures=["RobertaModel"], pad_token_id=127),
        "max_position_embeddings is 128; more than 128 is expected",
    ),
    "a missing tensor": (
        tensors(lambda held: held.pop("encoder.layer.1.output.dense.bias")),
        "/model.safetensors lacks encoder.layer.1.output.dense.bias, which config.json calls for",
    ),
    "a tensor too many": (
        tensors(lambda held: held.update({"encoder.layer.2.output.dense.bias": torch.zeros(32)})),
        (
            "/model.safetensors holds encoder.layer.2.output.dense.bias, which BertModel as config.json describes it "
            "does not use; serving without would give wrong answers"
        ),
    ),
    "a tensor twice": (
        tensors(lambda held: held.update({"bert.embeddings.word_embeddings.weight": torch.zeros(141, 32)})),
        "/model.safetensors holds embeddings.word_embeddings.weight twice, once with the prefix bert.: remove one",
    ),
    "integers": (
        tensors(lambda held: held.update({"embeddings.LayerNorm.bias": torch.zeros(32, dtype=torch.int8)})),
        "embeddings.LayerNorm.bias is stored as I8; F64, F32, F16, BF16 are supported, and quantised weights as",
    ),
    "damaged numbers": (
        tensors(lambda held: held["embeddings.LayerNorm.bias"].fill_(torch.nan)),
        "embeddings.LayerNorm.bias holds numbers from nan to nan",
    ),
    "modules that are no list": (module_list({}), "/modules.json must hold a list of objects, one for each module"),
    "no modules": (module_list([]), "/modules.json must hold a list of objects, one for each module"),
    "a module that is none": (module_list(["Transformer"]), "/modules.json must hold a list of objects"),
    "another module": (
        module_list([TRANSFORMER, {"type": "sentence_transformers.models.LSTM", "path": "1_LSTM"}]),
        (
            "/modules.json: [1].type is 'sentence_transformers.models.LSTM'; one of Transformer, Pooling, Dense, "
            "Normalize is supported"
        ),
    ),
    "a module without a type": (
        module_list([{"path": ""}]),
        "/modules.json: [0].type is missing; one of Transformer, ",
    ),
    "a module without a path": (
        module_list([{"type": "sentence_transformers.models.Transformer"}]),
        "/modules.json: [0].path is missing; a folder below the model's is expected",
    ),
    "a module elsewhere": (
        module_list([TRANSFORMER | {"path": "../other"}]),
        "/modules.json: [0].path is '../other'; a folder below the model's is expected",
    ),
    "a module at the root": (
        module_list([TRANSFORMER | {"path": "/etc"}]),
        "/modules.json: [0].path is '/etc'; a folder below the model's is expected",
    ),
    "no pooling": (
        modules("Transformer", "Normalize"),
        "/modules.json lists Transformer, Normalize; Transformer, Pooling and then any Dense and Normalize is ",
    ),
    "two poolings": (
        modules("Transformer", "Pooling", "Pooling"),
        "/modules.json lists Transformer, Pooling, Pooling; ",
    ),
    "no folder of the pooling": (
        module_list([TRANSFORMER, {"type": "sentence_transformers.models.Pooling", "path": "9_Pooling"}]),
        "/9_Pooling/config.json does not exist; a model directory needs it",
    ),
    "a pooling that is none": (
        pooling(pooling_mode="median"),
        (
            "/1_Pooling/config.json: pooling_mode is 'median'; one of cls, max, mean, mean_sqrt_len_tokens, "
            "weightedmean, lasttoken, or a list of them, is supported"
        ),
    ),
    "a pooling of unhashable kind": (pooling(pooling_mode=[["mean"]]), "pooling_mode is [['mean']]; one of cls, "),
    "a pooling that is no flag": (
        pooling(pooling_mode_mean_tokens="yes"),
        "/1_Pooling/config.json: pooling_mode_mean_tokens is 'yes'; true or false is expected",
    ),
    "pooling of another width": (
        pooling(word_embedding_dimension=384),
        "/1_Pooling/config.json: word_embedding_dimension is 384; the model's 32 is expected",
    ),
    "prompts apart": (
        pooling(include_prompt=False),
        "/1_Pooling/config.json: include_prompt is False; only true is supported: prompts are pooled with their texts",
    ),
    "dense of another width": (dense(in_features=16), "/2_Dense/config.json: in_features is 16; the 32 of what comes "),
    "dense with a residual": (dense(use_residual=True), "/2_Dense/config.json: use_residual is True; only false is "),
    "dense over tokens": (
        dense(module_input_name="token_embeddings"),
        "/2_Dense/config.json: module_input_name is 'token_embeddings'; 'sentence_embedding' is supported",
    ),
    "dense of another activation": (
        dense(activation_function="torch.nn.modules.activation.Softmax"),
        (
            "activation_function is 'torch.nn.modules.activation.Softmax'; one of Identity, Sigmoid, Tanh, ReLU, GELU "
            "of torch.nn is supported"
        ),
    ),
    "dense of another shape": (
        dense(out_features=9),
        "/2_Dense/model.safetensors: linear.weight has shape [8, 32], but config.json calls for [9, 32]",
    ),
    "dense without a bias": (
        dense(bias=True),
        "/2_Dense/model.safetensors lacks linear.bias, which config.json calls for",
    ),
    "no length": (
        sentence(max_seq_length=0),
        "/sentence_bert_config.json: max_seq_length is 0; an integer of at least 1",
    ),
    "prompts that are none": (said(prompts=["query: "]), "prompts is ['query: ']; an object from names to texts"),
    "an unknown prompt": (
        said(prompts={"query": "q"}, default_prompt_name="document"),
        "default_prompt_name is 'document'; one of the prompts is expected: query",
    ),
    "a prompt of unhashable kind": (
        said(default_prompt_name=["a"]),
        "default_prompt_name is ['a']; one of the prompts ",
    ),
}
SCORERS: dict[str, tuple[Edit, str]] = {
    "three labels": (
        config(id2label={"0": "no", "1": "maybe", "2": "yes"}),
        "id2label is {'0': 'no', '1': 'maybe', '2': 'yes'}; one label is supported, a score, and here are 3",
    ),
    "two labels by default": (
        config(id2label=None),
        "num_labels is missing; one label is supported, a score, and here ",
    ),
    "another activation": (
        config(sentence_transformers={"activation_fn": "my.Own"}),
        "sentence_transformers.activation_fn is 'my.Own'; one of Identity, Sigmoid, Tanh, ReLU, GELU of torch.nn is ",
    ),
    "more modules": (
        modules("Transformer", "Normalize"),
        "/modules.json lists Transformer, Normalize; Transformer alone is supported",
    ),
    "no separator": (
        lambda folder: edit(folder / "tokenizer_config.json", sep_token=None),
        "/tokenizer_config.json: no sep_token of the vocabulary is named; the model tells two texts apart by it",
    ),
    "no head": (
        tensors(lambda held: held.pop("classifier.weight")),
        "/model.safetensors lacks classifier.weight, which config.json calls for",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_folder_that_would_give_wrong_vectors_is_refused(name: str, tmp_path: Path) -> None:
    refused(MALFORMED[name], "embed", tmp_path)


@pytest.mark.parametrize("name", SCORERS)
def test_a_folder_that_would_give_wrong_scores_is_refused(name: str, tmp_path: Path) -> None:
    refused(SCORERS[name], "score", tmp_path)


def refused(case: tuple[Edit, str], kind: Kind, folder: Path) -> None:
    change, message = case
    save_tiny_encoder(folder, kind)
    change(folder)
    with pytest.raises(ModelLoadError) as error:
        load_encoder(folder, device=torch.device("cpu"), dtype=torch.float32)
    assert message in str(error.value)
    assert str(folder) in str(error.value)


def test_a_tokenizer_that_does_not_lower_case_is_refused_where_it_should(tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path)
    edit(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    load_encoder(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelLoadError, match=r"do_lower_case, and tokenizer\.json distinguishes A from a"):
        load_encoder(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
