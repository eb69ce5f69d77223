"""An input's vector and score depend on the input alone, and both are those of transformers."""

from pathlib import Path

import torch

from backend.encoders.encoder import Encoder, load_encoder
from tests.backend.encoders.tiny import DIM, MAX_TOKENS, save_tiny_encoder

CPU = torch.device("cpu")


def loaded(directory: Path) -> Encoder:
    return load_encoder(directory, device=CPU, dtype=torch.float32)


def test_a_tiny_encoder_says_what_it_is(tmp_path: Path) -> None:
    encoder = loaded(save_tiny_encoder(tmp_path))
    config = encoder.config
    assert (config.kind, config.dim, config.max_tokens, config.normalized) == ("embed", DIM, MAX_TOKENS, True)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) < 300_000
    vectors = encoder.run([encoder.tokenizer.encode(text, True) for text in ("One text.", "And another")])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))


def test_a_tiny_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    encoder = loaded(save_tiny_encoder(tmp_path, "score"))
    assert (encoder.config.kind, encoder.config.dim) == ("score", 1)
    scores = encoder.run([encoder.tokenizer.encode_pair("question", text) for text in ("an answer", "another one")])
    assert scores.shape == (2,) and bool(((scores > 0) & (scores < 1)).all())
