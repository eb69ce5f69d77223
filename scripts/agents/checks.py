"""Runs the checks of one client, and prints a line of JSON for each: its name, and its failure."""

import json
import os
import traceback
from collections.abc import Callable

BASE_URL, KEY, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["SLUICE_MODEL"]
EMBEDDING_MODEL = os.environ["SLUICE_EMBEDDING_MODEL"]
ASK = "What is the weather in Paris?"
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check for `run`; its docstring is its name."""
    CHECKS.append(function)
    return function


def check_vectors(one: Callable[[str], list[float]], many: Callable[[list[str]], list[list[float]]]) -> None:
    """A text has the vector alone that it has among others, more than a request of any client holds."""
    texts = ["1", "2 and 3", *map(str, range(4, 154))]
    vectors = many(texts)
    assert len(vectors) == len(texts), len(vectors)
    assert vectors[0] != vectors[1], vectors[0][:4]
    assert vectors[1] == one(texts[1]), (vectors[1][:4], one(texts[1])[:4])


def run() -> None:
    for function in CHECKS:
        problem = None
        try:
            function()
        except Exception:  # noqa: BLE001 - every error of a client is to be reported
            problem = traceback.format_exc(limit=4)[-1500:]
        print(json.dumps({"check": function.__doc__, "problem": problem}), flush=True)
