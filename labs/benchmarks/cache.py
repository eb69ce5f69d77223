"""The cache of benchmarks' costly artifacts."""

from pathlib import Path

from backend.kernels.build import cache_directory


def cache_dir() -> Path:
    return cache_directory() / "benchmarks"
