"""Trains the embedded model from nothing and writes it to backend/embedded/: about 20 minutes on two cores.

    python -m scripts.train_embedded_model

The text comes from `labs.benchmarks.skills`, without the combinations of arguments held out for measuring. Seeds are
fixed; the result may still differ in its last bits between processors. Needs transformers (a development dependency).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.embedded_corpus import Batch, Corpus, tokenizer_texts
from scripts.embedded_tokenizer import BEGIN, END, MAX_POSITIONS, save_tokenizer, train_tokenizer, with_tool_tokens

FOLDER = Path(__file__).parent.parent / "backend" / "embedded"
SEED = 20
HEAD_DIM = 32
ROPE_THETA = 500_000.0
NUM_STEPS = 2600
TOKENS_A_STEP = 3072
SHORTEST_LIMIT, LONGEST_LIMIT = 64, 1536  # of a conversation's tokens, at the start and after `GROWTH_SHARE` of steps
GROWTH_SHARE = 0.6
LATE_LIMIT, LONG_EVERY = 320, 5
PEAK_RATE, RESUMED_RATE = 3e-3, 1e-3
WARMUP_STEPS, RESUMED_WARMUP_STEPS = 100, 30
DECAY_SHARE, RESUMED_DECAY_SHARE = 0.5, 0.8
SAVE_EVERY = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--resume", type=Path, help="go on from this folder's tokenizer and weights")
    parser.add_argument("--seed", type=int, default=SEED, help="of the text and the weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.resume:
        tokenizer = with_tool_tokens(Tokenizer.from_file(str(options.resume / "tokenizer.json")))
        model = LlamaForCausalLM.from_pretrained(options.resume, dtype=torch.float32).train()
        schedule = Schedule(options.steps, RESUMED_RATE, RESUMED_WARMUP_STEPS, RESUMED_DECAY_SHARE, growth_share=0)
    else:
        tokenizer = train_tokenizer(tokenizer_texts(num_turns=20_000, seed=options.seed))
        model = new_model(tokenizer, options.seed)
        schedule = Schedule(options.steps)
    save_tokenizer(tokenizer, options.folder)
    train(model, Corpus(tokenizer, options.seed), schedule, options.folder)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Lengths of conversations and rates of learning over `num_steps`."""

    num_steps: int
    peak_rate: float = PEAK_RATE
    warmup_steps: int = WARMUP_STEPS
    decay_share: float = DECAY_SHARE
    growth_share: float = GROWTH_SHARE

    def length_limit(self, step: int) -> int:
        """Grows geometrically, as short answers teach most in the least time; then one step in five has long ones."""
        if step > self.growth_share * self.num_steps:
            return LATE_LIMIT if step % LONG_EVERY else LONGEST_LIMIT
        growth: float = (LONGEST_LIMIT / SHORTEST_LIMIT) ** (step / (self.growth_share * self.num_steps))
        return round(SHORTEST_LIMIT * growth)

    def rate_factor(self, step: int) -> float:
        """Warm up, hold, then decay linearly to zero (the trapezoid of arXiv:2405.18392)."""
        remaining = (self.num_steps - step) / (self.decay_share * self.num_steps)
        return min(1.0, (step + 1) / self.warmup_steps, remaining)


def new_model(tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """2.6 M parameters, initialised from the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END),
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        match_content(layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight)
    model.train()
    return model


@torch.no_grad()
def match_content(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Lets the first query head of every key head start equal to it: it attends to tokens like its own.

    `queries` are # [num_heads * HEAD_DIM, hidden], `keys` # [num_kv_heads * HEAD_DIM, hidden]. This is the mimetic
    initialisation of arXiv:2305.09828. The first recipe that copied reliably had it, a larger rope theta and a third
    key head; they were not tried apart.
    """
    hidden = queries.shape[1]
    torch.nn.init.normal_(queries, std=hidden**-0.5)
    torch.nn.init.normal_(keys, std=hidden**-0.5)
    grouped = queries.view(len(keys) // HEAD_DIM, -1, HEAD_DIM, hidden)  # [num_kv_heads, group, HEAD_DIM, hidden]
    grouped[:, 0] = keys.view(-1, HEAD_DIM, hidden)


def train(model: LlamaForCausalLM, corpus: Corpus, schedule: Schedule, folder: Path) -> None:
    """Saves to `folder` now and then and at the end."""
    optimizers = new_optimizers(model, schedule.peak_rate)
    rates = [LambdaLR(optimizer, schedule.rate_factor) for optimizer in optimizers]
    num_steps = schedule.num_steps
    started = time.monotonic()
    for step in range(1, num_steps + 1):
        loss = train_step(model, optimizers, corpus.batch(TOKENS_A_STEP, schedule.length_limit(step)))
        for rate in rates:
            rate.step()
        if step % 10 == 0:
            print(f"step {step}/{num_steps}  loss {loss:.4f}  {time.monotonic() - started:.0f} s", flush=True)
        if step % SAVE_EVERY == 0 or step == num_steps:
            save_model(model, folder)


def new_optimizers(model: LlamaForCausalLM, peak_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (arXiv:2502.16982) for the matrices of the layers, AdamW for embeddings and norms."""
    layers = list(model.model.layers.parameters())
    matrices = [parameter for parameter in layers if parameter.ndim == 2]
    others = [*(parameter for parameter in layers if parameter.ndim != 2), model.model.embed_tokens.weight]
    others.append(model.model.norm.weight)
    return [
        torch.optim.Muon(matrices, lr=peak_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_step(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    """One step; returns the loss in nats a learnt token. Attention stays within a conversation, told by positions."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=batch.tokens, labels=batch.labels, position_ids=batch.positions, use_cache=False)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(output.loss.detach())


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights in bfloat16 without the tied output matrix, config.json and generation_config.json."""
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    write_json(folder / "config.json", config_fields(model.config))
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {**ids, "do_sample": False})


def config_fields(config: LlamaConfig) -> dict[str, object]:
    """The fields of config.json by the names that transformers 4 and 5 and other engines all read."""
    names = (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
        "mlp_bias", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    fields: dict[str, object] = {name: getattr(config, name) for name in names}
    return {
        "architectures": ["LlamaForCausalLM"],
        **fields,
        "rope_theta": ROPE_THETA,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
