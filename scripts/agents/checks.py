"""Runs the checks of one client, and prints a line of JSON for each: its name, and its failure."""

import json
import os
import traceback
from collections.abc import Callable

BASE_URL, KEY, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["SLUICE_MODEL"]
ASK = "What is the weather in Paris?"
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check for `run`; its docstring is its name."""
    CHECKS.append(function)
    return function


def run() -> None:
    for function in CHECKS:
        problem = None
        try:
            function()
        except Exception:  # noqa: BLE001 - every error of a client is to be reported
            problem = traceback.format_exc(limit=4)[-1500:]
        print(json.dumps({"check": function.__doc__, "problem": problem}), flush=True)
