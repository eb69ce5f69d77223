"""Where benchmarks keep what they would otherwise make or install at every run."""

from pathlib import Path

from backend.kernels.build import cache_directory


def cache_dir() -> Path:
    return cache_directory() / "benchmarks"
