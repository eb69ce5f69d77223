"""Several answers to one prompt: what they hold on the real engine, and that they are let in and end as one."""

import asyncio
import json

from backend.text.tokenizer import Tokenizer
from tests.gateway.paper_gateway import Client, Gateway


def _asking(num_answers: int) -> Client:
    body = {"model": "paper", "prompt": [5, 6, 7], "max_tokens": 6, "n": num_answers}
    return Client("/v1/completions", [json.dumps(body).encode()])


async def test_answers_are_let_in_together_or_not_at_all(embedded_tokenizer: Tokenizer) -> None:
    """40 sequences may wait, and 8 run. The engine begins only when all have asked."""
    gateway = Gateway(embedded_tokenizer)
    clients = [_asking(count) for count in (30, 30, 18, 11, 1)]
    asks = []
    for client in clients:
        asks.append(asyncio.create_task(client.ask(gateway.app)))
        for _ in range(20):
            await asyncio.sleep(0)
    assert gateway.engine.num_streams == 30 + 18
    gateway.engine.start()
    await asyncio.gather(*asks)
    assert [client.sent[0]["status"] for client in clients] == [200, 503, 200, 503, 503]
    found = [json.loads(client.sent[1]["body"]) for client in (clients[0], clients[2])]
    assert [len(reply["choices"]) for reply in found] == [30, 18]
    gateway.scheduler.check_integrity()
    assert gateway.scheduler.kv_manager.num_held == 0 and not gateway.store.outstanding
    await gateway.engine.shut_down()
