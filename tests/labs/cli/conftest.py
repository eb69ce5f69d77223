from tests.gateway.cli.conftest import printed, sluice

__all__ = ["printed", "sluice"]
