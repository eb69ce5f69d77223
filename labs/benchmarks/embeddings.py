"""Embeddings in batches, beside one input at a time: `python -m labs.benchmarks.embeddings`.

A gateway with a BERT of MiniLM's shape and random weights has one core, the load generator another; gateways with
batches, without waiting for them, and of one input a batch take turns. Clients send texts of 16 tokens, and of 8: 64
each as soon as its last is answered, then one alone. Between them the model runs by itself on the gateway's core, one
input at a time and as many as fill a pass: what batches save is at most what they save there. Beside eight streams of
answers, what a flood of embeddings does to the time between their tokens.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, pairwise, repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from backend.encoders.encoder import TOKENS_PER_CPU_PASS, Encoder, load_encoder
from labs.benchmarks import machine
from labs.benchmarks.load import Clients, Load, closed_loop, post
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served

WORDS = 2000
TOKENS, FEW_TOKENS = 16, 8  # of a text, its two special ones included
CONNECTIONS, STREAMS = 64, 8
TENANT, FLOOD = "chats", "embeds"
KINDS: Mapping[str, Mapping[str, object]] = {
    "batches": {},
    "without a wait": {"embedding_queue_delay": 0},
    "one input a batch": {"embedding_batch_tokens": 1},
}
PROMISED_S = 0.08  # between two tokens, of the class of the streams
LOADS = (
    (CONNECTIONS, TOKENS, "64 clients at once"),
    (CONNECTIONS, FEW_TOKENS, "64 clients at once, 8 tokens"),
    (1, TOKENS, "one client alone"),
)
LEAST_OF_MODEL = 0.8  # of what batches save the model alone


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a BERT."""

    layers: int
    width: int
    inner: int
    heads: int = 12


MINILM, BGE_BASE = Shape(6, 384, 1536), Shape(12, 768, 3072)


def save_encoder(directory: Path, shape: Shape = MINILM) -> Path:
    """Write a model with random weights, and a tokenizer of `WORDS` words."""
    directory.mkdir()
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(WORDS))])}
    core = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = WhitespaceSplit()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "cls_token": "[CLS]"}))
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": len(vocabulary),
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(_weights(shape, len(vocabulary))), directory / "model.safetensors")
    return directory


def _weights(model: Shape, vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.02

    for name, rows in (("word", vocab_size), ("position", 512), ("token_type", 2)):
        yield f"embeddings.{name}_embeddings.weight", drawn(rows, model.width)
    norms = ["embeddings.LayerNorm"]
    for layer in range(model.layers):
        base = f"encoder.layer.{layer}"
        norms += [f"{base}.attention.output.LayerNorm", f"{base}.output.LayerNorm"]
        square = [f"{base}.attention.{part}" for part in ("self.query", "self.key", "self.value", "output.dense")]
        shapes = [(name, model.width, model.width) for name in square]
        shapes += [
            (f"{base}.intermediate.dense", model.inner, model.width),
            (f"{base}.output.dense", model.width, model.inner),
        ]
        for name, rows, columns in shapes:
            yield f"{name}.weight", drawn(rows, columns)
            yield f"{name}.bias", torch.zeros(rows)
    for name in norms:
        yield f"{name}.weight", torch.ones(model.width)
        yield f"{name}.bias", torch.zeros(model.width)


def texts(key: str, tokens: int = TOKENS) -> Iterator[bytes]:
    """Yields requests to embed a text, each another."""
    for number in count():
        words = " ".join([str((number * 31 + n * 7) % WORDS) for n in range(tokens - 2)])
        yield post("/v1/embeddings", {"model": "encoder", "input": words, "encoding_format": "base64"}, key)


def _figures(load: Load) -> dict[str, float]:
    ordered = sorted(load.latencies)
    return {"requests/s": load.answers / load.seconds, "p50 ms": 1e3 * quantile(ordered, 0.5)} | {
        "p99 ms": 1e3 * quantile(ordered, 0.99)
    }


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement in each run")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.5) if options.quick else (options.runs, options.seconds)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    report = Report("embeddings", options.quick)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        encoder = save_encoder(Path(folder) / "encoder")
        servers = {
            kind: stack.enter_context(
                served(server_core, [TENANT, FLOOD], Path(folder) / str(n), embedding_model=encoder, **settings)
            )
            for n, (kind, settings) in enumerate(KINDS.items())
        }
        model = load_encoder(encoder, device=torch.device("cpu"), dtype=torch.float32)
        torch.set_num_threads(1)
        for connections, tokens, title in LOADS:
            found, saved = _Found(list), list[float]()
            for _ in range(runs):
                for kind, server in servers.items():
                    load = closed_loop(server.port, texts(server.keys[TENANT], tokens), connections, seconds)
                    found[kind].append(_figures(load))
                with machine.on_core(server_core):
                    saved.append(_saved(model, tokens, seconds))
            _judge(report, title, found, connections, Spread.of(saved))
        _beside(report, servers["batches"], runs, seconds)
    return report.finish(options.results)


_Found = defaultdict[str, list[dict[str, float]]]  # figures of each run, by the kind of gateway


def _saved(model: Encoder, tokens: int, seconds: float) -> float:
    """The time of an input alone over its time in a pass, of the model by itself."""
    times: dict[int, list[float]] = {1: [], TOKENS_PER_CPU_PASS // tokens: []}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for inputs, each in times.items():
            began = time.perf_counter()
            model.run([[5] * tokens] * inputs)
            each.append((time.perf_counter() - began) / inputs)
    alone, together = map(median, times.values())
    return alone / together


def _judge(report: Report, title: str, found: _Found, connections: int, saved: Spread) -> None:
    spreads = {kind: {what: Spread.of([one[what] for one in each]) for what in each[0]} for kind, each in found.items()}
    report.add_table(title, [{"gateway": kind, **figures} for kind, figures in spreads.items()])
    batches, single = spreads["batches"], spreads["one input a batch"]
    if connections > 1:
        rate = batches["requests/s"].median / single["requests/s"].median
        report.at_least(f"{title}: rate over one input a batch", rate, 3.0)
        report.notes.append(
            f"{title}, the model alone: an input of a full pass over one by itself: {saved} times the rate"
        )
        report.at_least(f"{title}: the same over what the model alone makes of it", rate / saved.median, LEAST_OF_MODEL)
        later = batches["p99 ms"].median - single["p99 ms"].median
        report.at_most(f"{title}: p99 above one input a batch, ms", later, 5)
    else:
        plain = spreads["without a wait"]
        ratio = batches["p50 ms"].median / plain["p50 ms"].median
        report.at_most(f"{title}: p50 over that without a wait", ratio, 1.05)


def _beside(report: Report, server: Served, runs: int, seconds: float) -> None:
    """Show the time between tokens of streams, alone and beside a flood of another tenant's embeddings."""
    gaps: dict[str, list[float]] = {"alone": [], "beside embeddings": []}
    rates: list[float] = []
    body = {"model": "embedded", "prompt": [[5, 6, 7]], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    stream = post("/v1/completions", body, server.keys[TENANT])
    for _ in range(runs):
        for what, figures in gaps.items():
            with Clients(server.port, STREAMS) as streams, ThreadPoolExecutor(1) as beside:
                streams.begin_streams(repeat(stream))
                flood = None
                if what != "alone":
                    flood = beside.submit(closed_loop, server.port, texts(server.keys[FLOOD]), CONNECTIONS, seconds)
                streams.stream_for(seconds)
                if flood is not None:
                    rates.append(_figures(flood.result())["requests/s"])
                times = [connection.event_times for connection in streams.connections]
                between = sorted([b - a for each in times for a, b in pairwise(each)])
                figures.append(1e3 * quantile(between, 0.99))
    rows = [{"streams": what, "p99 between tokens, ms": Spread.of(figures)} for what, figures in gaps.items()]
    report.add_table(f"{STREAMS} streams", rows)
    report.notes.append(f"embeddings/s beside them: {Spread.of(rates)}")
    most = Spread.of(gaps["beside embeddings"]).median
    report.at_most("beside a flood of embeddings: p99 between tokens, ms", most, 1e3 * PROMISED_S)


if __name__ == "__main__":
    sys.exit(main())
