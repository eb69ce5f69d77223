"""Benchmarks run the core as `sluice` does: compiled, if it was compiled from the sources as they are.

BENCHMARK_CORE=interpreted in the environment has it interpreted.
"""

import os

from backend import compiled_core

if os.environ.get("BENCHMARK_CORE") != "interpreted":
    compiled_core.use()
