import asyncio
from collections.abc import AsyncIterator

import pytest

from backend.text.tokenizer import Tokenizer
from tests.gateway.paper_gateway import Gateway


@pytest.fixture
async def gateway(embedded_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    """Nothing of what its workers asked for may be left at the end."""
    gateway = Gateway(embedded_tokenizer)
    gateway.engine.start()
    yield gateway
    async with asyncio.timeout(240):
        while gateway.scheduler.has_work:
            await asyncio.sleep(0)
    assert not gateway.service.telemetry.live
    assert not gateway.store.outstanding
    assert gateway.scheduler.kv_manager.num_held == 0
    assert gateway.engine.num_streams == 0
    await gateway.engine.shut_down()
