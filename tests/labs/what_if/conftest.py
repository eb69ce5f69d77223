"""The store of the quotas' tests, which the limiter is compared with."""

from tests.quotas.conftest import loop_and_runner, valkey_url

__all__ = ["loop_and_runner", "valkey_url"]
