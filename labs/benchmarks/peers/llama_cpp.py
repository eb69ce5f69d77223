"""llama.cpp in its own environment: one context of many sequences, batched as its server batches them.

A step holds a token of each sequence that decodes, then prompts as far as `BATCH_TOKENS` go. It knows token ids alone.
"""

import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np
from safetensors import safe_open

from labs.benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from labs.benchmarks.workload import MAX_POSITIONS, Workload

BATCH_TOKENS = 512
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 512, 8, 8, 4, 1408, 8192  # of labs.benchmarks.random_llama


def converted(directory: Path, dtype: str) -> Path:
    """The model as a GGUF file beside it, if it is none; norms stay in fp32, as llama.cpp has them."""
    if directory.suffix == ".gguf":
        return directory
    path = directory.parent / f"{directory.name}-{dtype}.gguf"
    if not path.exists():
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(MAX_POSITIONS)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HIDDEN // HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(VOCAB)
        writer.add_tokenizer_model("none")
        _add_tensors(writer, directory / "model.safetensors", dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _add_tensors(writer: gguf.GGUFWriter, source: Path, dtype: str) -> None:
    names = dict(TENSORS)
    for layer in range(LAYERS):
        for ours, theirs in LAYER_TENSORS.items():
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    with safe_open(source, "numpy") as stored:
        for ours, theirs in names.items():
            tensor = stored.get_tensor(f"{theirs}.weight").astype(np.float32)
            if ours.endswith(("attn_q", "attn_k")):  # rotated pairs are neighbours there, halves of a head here
                half = HIDDEN // HEADS // 2
                tensor = tensor.reshape(-1, 2, half, HIDDEN).swapaxes(1, 2).reshape(tensor.shape)
            kind = gguf.GGMLQuantizationType.F32
            if dtype == "bfloat16" and tensor.ndim == 2:
                kind = gguf.GGMLQuantizationType.BF16
                tensor = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(f"{ours}.weight", tensor, raw_dtype=kind)


@dataclass(slots=True)
class Running:
    """A request in a slot, which is its sequence in the context."""

    slot: int
    tokens: list[int]  # of the prompt, then one for each step
    left: int
    times: list[float]
    computed: int = 0


class Context:
    """llama.cpp's context, and the one batch that its steps are written to."""

    def __init__(self, path: Path, slots: int) -> None:
        llama.llama_backend_init()
        model = llama.llama_model_default_params()
        model.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(str(path).encode(), model)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = slots * MAX_POSITIONS, slots, True
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = 1
        self.context = llama.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp made no context"
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.memory = llama.llama_get_memory(self.context)
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def step(self, running: list[Running]) -> list[Running]:
        """Compute a step; returns the requests with one more token."""
        batch, count = self.batch, 0
        sampled: list[tuple[int, Running]] = []
        for each in sorted(running, key=lambda each: len(each.tokens) - each.computed > 1):  # decodes first
            known = min(len(each.tokens) - each.computed, BATCH_TOKENS - count)
            for position in range(each.computed, each.computed + known):
                batch.token[count], batch.pos[count] = each.tokens[position], position
                batch.n_seq_id[count], batch.seq_id[count][0], batch.logits[count] = 1, each.slot, 0
                count += 1
            each.computed += known
            if known and each.computed == len(each.tokens):
                batch.logits[count - 1] = 1
                sampled.append((count - 1, each))
        batch.n_tokens = count
        failed = llama.llama_decode(self.context, batch)
        assert failed == 0, f"llama_decode answered {failed}"
        for row, each in sampled:
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, row), (self.vocab_size,))
            each.tokens.append(int(logits.argmax()))
        return [each for _, each in sampled]

    def perplexity(self, tokens: list[int]) -> float:
        """The perplexity of all tokens but the first, in a sequence of their own."""
        total = 0.0
        for first in range(0, len(tokens), BATCH_TOKENS):
            some = tokens[first : first + BATCH_TOKENS]
            for row, token in enumerate(some):
                self.batch.token[row], self.batch.pos[row] = token, first + row
                self.batch.n_seq_id[row], self.batch.seq_id[row][0], self.batch.logits[row] = 1, 0, 1
            self.batch.n_tokens = len(some)
            assert llama.llama_decode(self.context, self.batch) == 0
            for row, following in enumerate(tokens[first + 1 : first + 1 + len(some)]):
                pointer = llama.llama_get_logits_ith(self.context, row)
                logits = np.ctypeslib.as_array(pointer, (self.vocab_size,)).astype(np.float64)
                total += logits[following] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return float(np.exp(-total / (len(tokens) - 1)))

    def free(self, slot: int) -> None:
        llama.llama_memory_seq_rm(self.memory, slot, -1, -1)


@contextmanager
def load(options: Namespace) -> Iterator[Generate]:
    context = Context(converted(Path(options.model), options.dtype), options.max_num_seqs)

    def generate(workload: Workload) -> Generated:
        started = time.perf_counter()
        times: list[list[float]] = [[] for _ in workload.prompts]
        waiting = deque(zip(workload.prompts, workload.max_tokens, times, strict=True))
        slots, running = list(range(options.max_num_seqs)), []
        while waiting or running:
            while waiting and slots:
                prompt, left, own = waiting.popleft()
                running.append(Running(slots.pop(), list(prompt), left, own))
            for each in context.step(running):
                each.times.append(time.perf_counter() - started)
                each.left -= 1
                if each.left == 0:
                    running.remove(each)
                    context.free(each.slot)
                    slots.append(each.slot)
        return Generated(time.perf_counter() - started, times, 0)

    yield generate


if __name__ == "__main__":
    own = parser()
    own.add_argument("--perplexity", action="store_true", help="of the token ids that come in as JSON")
    asked = own.parse_args()
    if asked.perplexity:
        print(Context(Path(asked.model), 8).perplexity(json.load(sys.stdin)))
    else:
        answer_requests(asked, load)
