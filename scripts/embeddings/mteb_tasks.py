"""Scores a served model and sentence-transformers by MTEB: `mteb_tasks.py FOLDER DATA URL KEY MODEL`.

DATA is a folder with judgments of similarity by people: 50 news texts (Lee et al., 2005), WordSim-353 and SimLex-999.
MTEB's own tasks fetch theirs from a hub. Writes a line of JSON for each task: its pairs, and the Spearman correlations.
"""

import json
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import torch
from datasets import Dataset
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta
from openai import OpenAI
from sentence_transformers import SentenceTransformer

BATCH = 128  # texts of a request
WORD_PAIRS = (("wordsim353", "tsv"), ("simlex999", "txt"))
Pair = tuple[str, str, float]


def news(folder: Path) -> list[Pair]:
    texts = (folder / "lee.cor").read_text("latin-1").splitlines()
    judged = [
        [float(one) for one in line.split()] for line in (folder / "similarities0-1.txt").read_text().splitlines()
    ]
    return [(texts[one], texts[other], judged[one][other]) for one, other in combinations(range(len(texts)), 2)]


def words(path: Path) -> list[Pair]:
    rows = [line.split("\t") for line in path.read_text().splitlines() if line and line[0] != "#"]
    return [(one, other, float(judged)) for one, other, judged in rows]


def task(name: str, pairs: list[Pair]) -> AbsTaskSTS:
    class Task(AbsTaskSTS):
        metadata = TaskMetadata(
            name=name,
            description="Similarity as people judged it",
            reference=None,
            dataset={"path": "local", "revision": "1"},
            type="STS",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )
        max_score = 10

        def load_data(self, **options: Any) -> None:
            columns = dict(zip(("sentence1", "sentence2", "score"), map(list, zip(*pairs, strict=True)), strict=True))
            self.dataset = {"test": Dataset.from_dict(columns)}
            self.data_loaded = True

    return Task()


class Texts(AbsEncoder):
    """An encoder as MTEB asks it. Each text is embedded once: the pairs are of few."""

    def __init__(self, name: str, embed: Callable[[list[str]], Any]) -> None:
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"sluice/{name}", "revision": "1"})
        self._embed = embed

    def encode(self, inputs: Any, **options: Any) -> np.ndarray:
        texts = [text for batch in inputs for text in batch["text"]]
        vectors = self._embed(unique := [*dict.fromkeys(texts)])
        places = {text: place for place, text in enumerate(unique)}
        return np.asarray(vectors, np.float32)[[places[text] for text in texts]]


def main() -> None:
    folder, data, url, key, model = sys.argv[1:]
    torch.set_num_threads(1)
    client = OpenAI(base_url=url, api_key=key, timeout=600)

    def served(texts: list[str]) -> list[list[float]]:
        parts = [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]
        replies = [client.embeddings.create(model=model, input=part) for part in parts]
        return [one.embedding for reply in replies for one in reply.data]

    encoders = [Texts("oracle", SentenceTransformer(folder, device="cpu").encode), Texts("served", served)]
    tasks = {"Lee50": news(Path(data))} | {name: words(Path(data) / f"{name}.{end}") for name, end in WORD_PAIRS}
    for name, pairs in tasks.items():
        results = [mteb.evaluate(one, task(name, pairs), cache=None, show_progress_bar=False) for one in encoders]
        oracle, ours = (result.task_results[0].scores["test"][0]["cosine_spearman"] for result in results)
        told = {"task": name, "pairs": len(pairs), "sentence-transformers": oracle, "served": ours}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
