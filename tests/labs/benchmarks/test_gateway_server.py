import os

import httpx

from labs.benchmarks.gateway_server import KEY
from labs.benchmarks.processes import Worker

CHAT = {"model": "embedded", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3, "ignore_eos": True}


def test_the_server_of_benchmarks_is_the_whole_gateway_over_a_device_that_is_none() -> None:
    with Worker.module("labs.benchmarks.gateway_server", core=min(os.sched_getaffinity(0))) as server:
        url = f"http://127.0.0.1:{server.ready['port']}/v1/chat/completions"
        answer = httpx.post(url, json=CHAT, headers={"authorization": f"Bearer {KEY}"}, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert server.ask()["rows"] == 3
