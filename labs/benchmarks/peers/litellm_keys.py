"""LiteLLM's `custom_auth`: the benchmarks' keys and their limits. Runs in LiteLLM's environment."""

from fastapi import HTTPException, Request
from litellm.proxy._types import UserAPIKeyAuth

NEVER_REACHED = {"rpm_limit": 100_000_000, "tpm_limit": 1_000_000_000}
SEATS = {"max_parallel_requests": 64}
KEYS = {"sk-benchmark": NEVER_REACHED, "sk-light": NEVER_REACHED | SEATS, "sk-noisy": NEVER_REACHED | SEATS}


async def key_of(request: Request, api_key: str) -> UserAPIKeyAuth:  # noqa: ARG001 - what LiteLLM calls
    if api_key not in KEYS:
        raise HTTPException(401, "unknown key")
    return UserAPIKeyAuth(api_key=api_key, **KEYS[api_key])
