"""The store of the quotas' tests, which the limiter is compared with."""

from tests.quotas.conftest import runner, valkey_url

__all__ = ["runner", "valkey_url"]
