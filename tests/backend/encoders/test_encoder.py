"""An input's vector and score are those of transformers, and depend on the input alone."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, BertForMaskedLM, Qwen3ForCausalLM

from backend.encoders.encoder import TOKENS_PER_CPU_PASS, Encoder, load_encoder
from backend.encoders.packed import PackedInputs
from backend.errors import InvalidRequest, ModelLoadError
from tests.backend.encoders.families import (
    BIDIRECTIONAL,
    DECODERS,
    FAMILIES,
    edit,
    hidden_states,
    inputs,
    randomised,
    saved_model,
    saved_scorer,
)
from tests.backend.encoders.tiny import DIM, MAX_TOKENS, save_modules, save_tiny_encoder, save_tokenizer
from tests.examples import examples

CPU = torch.device("cpu")
EVERY_LENGTH = [family for family in FAMILIES if family != "mistral-window"]
LENGTHS = (5, 1, 33, 5, 150, 2, 33, 7)


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    return load_encoder(directory, device=CPU, dtype=dtype)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 in float32, and alike in direction."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert functional.cosine_similarity(found, expected, dim=-1).min() >= 0.9999


def means(model: torch.nn.Module, rows: list[list[int]]) -> Tensor:
    return torch.stack([hidden_states(model, tokens).mean(0) for tokens in rows])


@pytest.mark.parametrize("family", EVERY_LENGTH)
def test_means_of_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved_model(family, tmp_path)
    rows = inputs(*LENGTHS)
    assert_equal(loaded(tmp_path).run(rows), means(model, rows))


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_scores_of_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved_scorer(family, tmp_path)
    encoder = loaded(tmp_path)
    pairs = [("why?", "because"), ("a", "a longer answer, and more of it"), ("what of [SEP] in it?", "a [SEP] b")]
    rows = encoder.tokenizer.encode_inputs(pairs)
    expected = []
    for tokens in rows:
        second = tokens.index(encoder.tokenizer.sep_token_id or 0) + 1
        types = [int(place >= second) for place in range(len(tokens))]
        said = {"token_type_ids": torch.tensor([types])} if "bert" in family and family.startswith("bert") else {}
        with torch.no_grad():
            expected.append(model(input_ids=torch.tensor([tokens]), **said).logits[0, 0].sigmoid())
    torch.testing.assert_close(encoder.run(rows), torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda logits: logits),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda logits: logits),
        ({"sentence_transformers": {"version": "5.0"}}, torch.sigmoid),
        ({}, torch.sigmoid),
    ],
)
def test_a_logit_becomes_a_score_as_the_folder_says(
    said: dict[str, object], expected: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    model = saved_scorer("xlm-roberta", tmp_path)
    edit(tmp_path / "config.json", **said)
    (row,) = inputs(9)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row])).logits[0]
    torch.testing.assert_close(loaded(tmp_path).run([row]), expected(logits), rtol=0, atol=1e-5)


def test_a_separator_spelled_in_a_text_does_not_end_it_in_a_pair(tmp_path: Path) -> None:
    encoder = loaded(save_tiny_encoder(tmp_path, "score"))
    (tokens,) = encoder.tokenizer.encode_inputs([("a[SEP]b", "[CLS][SEP]")])
    assert tokens.count(encoder.tokenizer.sep_token_id or 0) == 2


def test_a_pair_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    encoder = loaded(save_tiny_encoder(tmp_path, "score"))
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        encoder.tokenizer.encode_inputs([("a", "\ud800")])


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls_token": lambda hidden: hidden[0],
    "max_tokens": lambda hidden: hidden.amax(0),
    "mean_tokens": lambda hidden: hidden.mean(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "weightedmean_tokens": lambda hidden: (
        torch.arange(1.0, len(hidden) + 1) @ hidden * 2 / len(hidden) / (len(hidden) + 1)
    ),
    "lasttoken": lambda hidden: hidden[-1],
}


@pytest.mark.parametrize("names", [[name] for name in POOLINGS] + [["mean_tokens", "cls_token"]])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_hidden_states_are_pooled_as_the_folder_says(family: str, names: list[str], tmp_path: Path) -> None:
    model, rows = saved_model(family, tmp_path), inputs(*LENGTHS)
    flags = {f"pooling_mode_{name}": name in names for name in POOLINGS} | {"word_embedding_dimension": 64}
    save_modules(tmp_path, "Transformer", "Pooling", pooling=flags)
    joined = [name for name in POOLINGS if name in names]  # in sentence-transformers' order, not the folder's
    expected = torch.stack([torch.cat([POOLINGS[name](hidden_states(model, row)) for name in joined]) for row in rows])
    encoder = loaded(tmp_path)
    assert encoder.config.dim == expected.shape[1]
    torch.testing.assert_close(encoder.run(rows), expected, rtol=0, atol=2e-5)


def test_new_folders_name_their_pooling(tmp_path: Path) -> None:
    model, rows = saved_model("bert", tmp_path), inputs(*LENGTHS)
    save_modules(tmp_path, "Transformer", "Pooling", pooling={"embedding_dimension": 64, "pooling_mode": "cls"})
    assert_equal(loaded(tmp_path).run(rows), torch.stack([hidden_states(model, row)[0] for row in rows]))


def test_a_causal_model_without_modules_is_pooled_by_its_last_token(tmp_path: Path) -> None:
    model = randomised(Qwen3ForCausalLM(DECODERS["qwen3"]()))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    rows = inputs(*LENGTHS)
    assert_equal(loaded(tmp_path).run(rows), torch.stack([hidden_states(model.model, row)[-1] for row in rows]))


def test_a_decoder_that_looks_both_ways_is_refused(tmp_path: Path) -> None:
    saved_model("qwen2", tmp_path)
    edit(tmp_path / "config.json", is_causal=False)
    with pytest.raises(ModelLoadError, match="is_causal is False; a decoder that looks both ways is not supported"):
        loaded(tmp_path)


def test_vectors_are_changed_by_dense_layers_and_normalised(tmp_path: Path) -> None:
    model, rows = saved_model("bert", tmp_path), inputs(*LENGTHS)
    save_modules(tmp_path, "Transformer", "Pooling", "Dense", "Normalize")
    edit(tmp_path / "2_Dense" / "config.json", in_features=64, out_features=24, bias=True)
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    expected = functional.normalize(torch.tanh(functional.linear(means(model, rows), weight, bias)), dim=1)
    encoder = loaded(tmp_path)
    assert_equal(encoder.run(rows), expected)
    assert encoder.config.dim == 24


def test_the_transformer_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    inner = tmp_path / "0_Transformer"
    model, rows = saved_model("distilbert", inner), inputs(*LENGTHS)
    save_modules(tmp_path, "Transformer", "Pooling", "Normalize")
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = inner.name
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    edit(inner / "sentence_distilbert_config.json", max_seq_length=40)
    encoder = loaded(tmp_path)
    assert encoder.config.max_tokens == 40
    assert_equal(encoder.run(rows[:3]), functional.normalize(means(model, rows[:3]), dim=1))


def test_the_default_prompt_stands_before_texts(tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path)
    prompts = {"query": "query: ", "document": ""}
    edit(tmp_path / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    config = loaded(tmp_path).config
    assert config.default_prompt == "query: "


@pytest.mark.parametrize(
    ("family", "sentence", "tokenizer", "expected"),
    [
        ("bert", {}, {}, 160),
        ("bert", {"max_seq_length": 100}, {"model_max_length": 50}, 100),
        ("bert", {"max_seq_length": 512}, {}, 160),
        ("bert", {}, {"model_max_length": 50}, 50),
        ("bert", {}, {"model_max_length": int(1e30)}, 160),
        ("xlm-roberta", {"max_seq_length": 160}, {}, 158),
        ("roberta", {}, {}, 156),
        ("qwen3", {}, {"model_max_length": 1000}, 160),
        ("mistral-window", {}, {}, 20),
    ],
)
def test_the_most_tokens_are_bounded_by_positions_and_by_the_folder(
    family: str, sentence: dict[str, int], tokenizer: dict[str, int], expected: int, tmp_path: Path
) -> None:
    model = saved_model(family, tmp_path)
    edit(tmp_path / "sentence_bert_config.json", **sentence)
    edit(tmp_path / "tokenizer_config.json", **tokenizer)
    encoder = loaded(tmp_path)
    assert encoder.config.max_tokens == expected
    rows = inputs(expected)
    assert_equal(encoder.run(rows), means(model, rows))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_weights_stored_in_16_bits_are_widened(family: str, stored: torch.dtype, tmp_path: Path) -> None:
    saved_model(family, tmp_path).to(stored).save_pretrained(tmp_path)
    model, rows = AutoModel.from_pretrained(tmp_path, dtype=torch.float32), inputs(*LENGTHS)
    assert_equal(loaded(tmp_path).run(rows), means(model, rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", EVERY_LENGTH)
def test_vectors_computed_in_16_bits_point_the_same_way(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, rows = saved_model(family, tmp_path), inputs(*LENGTHS)
    found = loaded(tmp_path, dtype).run(rows)
    assert found.dtype == torch.float32
    assert functional.cosine_similarity(found, means(model, rows)).min() >= (
        0.9999 if dtype == torch.float16 else 0.995
    )


def test_names_of_tensors_may_have_the_models_prefix(tmp_path: Path) -> None:
    model, rows = randomised(BertForMaskedLM(BIDIRECTIONAL["bert"]())), inputs(*LENGTHS)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert any(name.startswith("bert.") for name in load_file(tmp_path / "model.safetensors"))
    assert_equal(loaded(tmp_path).run(rows), means(model.bert, rows))


def test_norms_may_have_tensorflows_names(tmp_path: Path) -> None:
    model, rows = saved_model("bert", tmp_path), inputs(*LENGTHS)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in load_file(file).items():
        key = next((key for key in old if name.endswith(key)), "")
        renamed[name.removesuffix(key) + old.get(key, "")] = tensor
    save_file(renamed, file)
    assert_equal(loaded(tmp_path).run(rows), means(model, rows))


def test_no_inputs_have_no_vectors(tmp_path: Path) -> None:
    assert loaded(save_tiny_encoder(tmp_path)).run([]).shape == (0, DIM)
    assert loaded(save_tiny_encoder(tmp_path / "score", "score")).run([]).shape == (0,)


def test_a_tiny_encoder_is_small_and_whole(tmp_path: Path) -> None:
    encoder = loaded(save_tiny_encoder(tmp_path))
    config = encoder.config
    assert (config.kind, config.dim, config.max_tokens) == ("embed", DIM, MAX_TOKENS)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) < 300_000
    vectors = encoder.run([encoder.tokenizer.encode_text(text, True) for text in ("One text.", "And another")])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))


@pytest.fixture(scope="module", params=["bert", "bert-tanh-gelu", "xlm-roberta", "mpnet", "qwen3", "score"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    directory = tmp_path_factory.mktemp("encoder")
    if request.param == "score":
        saved_scorer("bert", directory)
    else:
        saved_model(request.param, directory)
        save_modules(directory, "Transformer", "Pooling", "Normalize")
    return loaded(directory)


@settings(max_examples=examples(12), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12).flatmap(st.permutations),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    seed=st.integers(0, 5),
    threads=st.sampled_from([1, 2]),
)
def test_results_do_not_depend_on_order_or_company(
    encoder: Encoder, lengths: list[int], cuts: list[int], seed: int, threads: int
) -> None:
    rows = inputs(*lengths, seed=seed)
    alone = torch.cat([encoder.run([row]) for row in rows])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        places = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
        parts = [encoder.run(rows[start:end]) for start, end in pairwise(places)]
    finally:
        torch.set_num_threads(before)
    together = torch.cat(parts)
    if encoder.batch_invariant:
        assert torch.equal(together, alone)
    else:
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_inputs_share_passes_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = loaded(save_tiny_encoder(tmp_path))
    passes: list[int] = []
    made = PackedInputs.__init__

    def counted(self: PackedInputs, *arguments: object) -> None:
        made(self, *arguments)  # type: ignore[arg-type]
        passes.append(len(self.token_ids))

    monkeypatch.setattr(PackedInputs, "__init__", counted)
    rows = inputs(*[16] * 256, 100, 3)
    encoder.run(rows)
    assert sum(passes) == sum(map(len, rows))
    assert max(passes) <= TOKENS_PER_CPU_PASS
    assert len(passes) == -(-sum(map(len, rows)) // TOKENS_PER_CPU_PASS)
