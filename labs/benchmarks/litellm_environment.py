"""LiteLLM's proxy in an environment of its own, because its dependencies are many and pinned."""

from pathlib import Path

from labs.benchmarks.own_environment import own_environment

REQUIREMENT = "litellm[proxy]==1.104.5"  # the latest whose dependencies were all on the index when this was measured


def litellm_command() -> Path:
    """The environment's `litellm`; installs some 0.7 GB at first use."""
    return own_environment(REQUIREMENT) / "litellm"
