"""A tenant whose traffic never ends, in a process of its own: `python -m labs.benchmarks.neighbour PORT KEY STREAMS`.

It keeps STREAMS streams going, each with a prompt of its own and an answer of `OUTPUT` tokens, until its input ends. It
answers each line of input with the number of requests that it has sent, as JSON, and ends with status 1 when a request
was not answered.
"""

import json
import sys
from collections.abc import Iterator
from random import Random
from threading import Thread

from labs.benchmarks.load import post
from labs.benchmarks.traffic import ClosedLoop, Traffic

PROMPT, OUTPUT = 64, 200  # tokens
A_DAY = 86_400.0  # seconds: it ends long before


class Requests(Iterator[bytes]):
    """Endless requests, none like another."""

    def __init__(self, key: str) -> None:
        self.count = 0
        self._key, self._random = key, Random(11)

    def __next__(self) -> bytes:
        self.count += 1
        prompt = [self._random.randrange(5, 500) for _ in range(PROMPT)]
        body = {"model": "embedded", "prompt": prompt, "max_tokens": OUTPUT, "stream": True, "ignore_eos": True}
        return post("/v1/completions", body, self._key)


def main(arguments: list[str]) -> int:
    port, key, streams = int(arguments[0]), arguments[1], int(arguments[2])
    requests, traffic = Requests(key), Traffic(port, refusals=())
    loops = {"neighbour": ClosedLoop(streams, requests)}
    thread = Thread(target=traffic.run, args=(A_DAY,), kwargs={"loops": loops}, daemon=True)
    thread.start()
    print("{}", flush=True)
    for _ in sys.stdin:
        if not thread.is_alive():
            return 1
        print(json.dumps({"requests": requests.count}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
