import pytest

from tests.gateway.telemetry.metrics_rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
