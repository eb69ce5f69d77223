"""Takes docs/admin.png anew: `python -m scripts.admin_picture`.

A gateway serves the embedded model to three tenants, and Chromium shows its admin page after a while.
"""

import random
import sys
import threading
import time
from argparse import ArgumentParser
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from labs.benchmarks.served import make_keys
from tests.end_to_end.page.browser import find_chromium, running_chromium
from tests.gateway.server_process import PATIENCE, ServerProcess, in_threads, running_server

PICTURE = Path(__file__).parent.parent / "docs" / "admin.png"
POLICY = """\
classes:
  interactive: {service_tiers: [priority]}
  batch: {service_tiers: [flex]}
tenants:
  acme: {weight: 2, default_class: interactive}
  globex: {default_class: interactive}
  initech: {default_class: batch}
"""
STREAMS = {"acme": 4, "globex": 3, "initech": 6}
ASKS = ("Tell me a story about a fox in 9 sentences.", "Count from 3 to 90.", "What is the weather in Oslo?")


def keep_asking(server: ServerProcess, key: str, ended: threading.Event) -> None:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(headers=headers, timeout=PATIENCE) as client:
        while not ended.is_set():
            body = {"messages": [{"role": "user", "content": random.choice(ASKS)}], "max_tokens": 300, "stream": True}
            with client.stream(
                "POST", f"{server.url}/v1/chat/completions", json={"model": "embedded", **body}
            ) as reply:
                for _ in reply.iter_bytes():
                    if ended.is_set():
                        break
            ended.wait(random.expovariate(1.0))


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0, help="of load before it is taken; charts show 300")
    options = parser.parse_args()
    binary = find_chromium()
    if binary is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    with TemporaryDirectory() as folder, running_chromium(binary) as chromium:
        policy = Path(folder, "policy.yaml")
        policy.write_text(POLICY)
        keys = make_keys(Path(folder, "state"), STREAMS)
        flags = (f"--policy={policy}", "--max-num-seqs=12", "--kv-memory-bytes=24MiB", "--threads=1")
        with running_server(Path(folder), *flags) as server, chromium.opened_page(width=1180, height=640) as page:
            ended = threading.Event()
            tasks = [
                lambda key=keys[name]: keep_asking(server, key, ended)
                for name, num in STREAMS.items()
                for _ in range(num)
            ]
            with in_threads(*tasks):
                try:
                    page.go(f"{server.admin_url}/")
                    page.sign_in(server.admin_key)
                    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)  # away from the table's rows
                    time.sleep(options.seconds)
                    page.until("document.querySelector('.pool path') && document.querySelector('.line')")
                    PICTURE.write_bytes(b64decode(page.send("Page.captureScreenshot", format="png")["data"]))
                finally:
                    ended.set()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
