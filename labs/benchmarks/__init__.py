"""Benchmarks run the core as `sluice` does: compiled, if it was compiled from the sources as they are.

BENCHMARK_CORE=interpreted in the environment has it interpreted, and so it is in tests, which replace parts of it.
"""

import os
import sys

from backend import compiled_core

if os.environ.get("BENCHMARK_CORE") != "interpreted" and "pytest" not in sys.modules:
    compiled_core.use()
