"""A Llama of 32 million random parameters for measuring engines by: the same weights for everyone who runs this."""

import os
from pathlib import Path
from random import Random
from shutil import rmtree

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from labs.benchmarks.cache import cache_dir
from labs.benchmarks.words import make_word
from labs.benchmarks.workload import MAX_POSITIONS, VOCAB_SIZE

SEED = 0
CONFIG = LlamaConfig(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=1408,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=MAX_POSITIONS,
    bos_token_id=0,
    eos_token_id=1,
)


def random_llama() -> Path:
    """The model's directory in Hugging Face layout, float32; made at first use."""
    directory = cache_dir() / "random-llama-32m"
    if not directory.is_dir():
        unfinished = directory.with_suffix(f".{os.getpid()}")
        _save(unfinished)
        try:
            unfinished.rename(directory)
        except OSError:  # another process was first
            rmtree(unfinished)
    return directory


def _save(directory: Path) -> None:
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(CONFIG)
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_bpe(), bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory)


def _bpe() -> Tokenizer:
    """A vocabulary of the model's size, learnt from made-up words: every token is text by itself."""
    rng = Random(SEED)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    text = (" ".join(make_word(rng) for _ in range(20)) for _ in range(5000))
    tokenizer.train_from_iterator(text, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer
