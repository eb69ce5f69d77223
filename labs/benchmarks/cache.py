"""The cache of benchmarks' costly artifacts."""

import os
from pathlib import Path


def cache_dir() -> Path:
    return Path(os.environ.get("SLUICE_CACHE_DIR") or "~/.cache/sluice").expanduser() / "benchmarks"
