"""llama.cpp in an environment of its own, compiled there for this machine's processor."""

from pathlib import Path

from labs.benchmarks.own_environment import own_environment

REQUIREMENT = "llama-cpp-python==0.3.36"
TO_CONVERT = ("gguf==0.19.0", "safetensors")


def llama_python() -> Path:
    """The environment's interpreter; compiles for some minutes at first use."""
    return own_environment(REQUIREMENT, also=TO_CONVERT, compiled=("llama-cpp-python",)) / "python"
