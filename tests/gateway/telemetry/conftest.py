from collections.abc import Iterator

import pytest

from tests.gateway.telemetry.metrics_rig import Rig
from tests.gateway.telemetry.otlp_receiver import Receiver, otlp_receiver


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver
