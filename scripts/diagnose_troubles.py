#!/usr/bin/env python3
"""Plant five troubles, one after another, in a gateway with the embedded model, and print what shows each:

    python scripts/diagnose_troubles.py [noisy_tenant|kv_pressure|long_prefill|slow_redis|slow_client ...]

What it prints is Markdown; docs/diagnosis.md has the output of one run. Needs prometheus on PATH.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from labs.benchmarks.processes import free_port
from labs.benchmarks.redis_server import RedisServer
from labs.faults.proxy import Proxy
from scripts.diagnosis.clients import clients, deaf_client
from scripts.diagnosis.observatory import observatory

TROUBLE_SECONDS = 14.0  # of trouble before the diagnosis: more than the dashboard's interval of 10 s


def noisy_tenant(directory: Path) -> None:
    """One tenant sends 40 requests at a time, another one at a time; eight run at once."""
    with observatory(directory, "--max-num-seqs", "8", tenants=("noisy", "quiet")) as seen:
        noise = clients(seen.server, seen.keys["noisy"], 40, max_tokens=200)
        with noise as noisy, clients(seen.server, seen.keys["quiet"], 1, max_tokens=20) as quiet:
            time.sleep(TROUBLE_SECONDS)
            show(seen.panel("Waiting, by tenant"), seen.panel("Engine time, by tenant"), doctor=seen.doctor())
        say(f"median time to the first byte: noisy {noisy.median:.2f} s, quiet {quiet.median:.2f} s")
        show(seen.trace("noisy", "sluice.queue"))


def kv_pressure(directory: Path) -> None:
    """Memory for 800 tokens, 24 clients that want 200 each, and a memory gate that admits every prompt that fits."""
    flags = ("--kv-memory-bytes", "3686400", "--max-model-len", "512", "--max-num-seqs", "64", "--admit", "optimistic")
    with observatory(directory, *flags) as seen:
        with clients(seen.server, seen.keys["demo"], 24, prompt_tokens=40, max_tokens=160):
            time.sleep(TROUBLE_SECONDS)
            show(
                seen.panel("KV memory"),
                seen.panel("Batch size"),
                seen.panel("Preemptions, by cause"),
                doctor=seen.doctor(),
            )
        show(seen.trace("demo", "sluice.decode"))


def long_prefill(directory: Path) -> None:
    """Four answers run while another tenant sends prompts of 1,900 tokens, where chunks may have 2,048 tokens and the
    class has no time per token to keep.
    """
    policy = directory / "policy.yaml"
    policy.write_text("classes: {standard: {ttft: 2s}}\n")
    flags = ("--prefill-chunk", "2048", "--max-num-batched-tokens", "2048", "--policy", str(policy))
    with observatory(directory, *flags, tenants=("reader", "writer")) as seen:
        prompts = clients(seen.server, seen.keys["writer"], 1, prompt_tokens=1900, max_tokens=1)
        with prompts, clients(seen.server, seen.keys["reader"], 4, max_tokens=150):
            time.sleep(TROUBLE_SECONDS)
            show(seen.panel("Time of a step, by kind"), seen.panel("Jitter between tokens"), doctor=seen.doctor())
        show(seen.trace("reader", "sluice.decode"))


def slow_redis(directory: Path) -> None:
    """The quota store answers 60 ms late, and every tenant has a limit that is counted there."""
    port, policy = free_port(), directory / "policy.yaml"
    policy.write_text("defaults: {limits: {requests: 100k/min}}\n")
    with (
        RedisServer(directory, port),
        Proxy(port) as slow,
        observatory(directory, "--redis-url", f"redis://127.0.0.1:{slow.port}/0", "--policy", str(policy)) as seen,
    ):
        slow.latency = 0.03  # seconds, each way
        with clients(seen.server, seen.keys["demo"], 4, max_tokens=20):
            time.sleep(TROUBLE_SECONDS)
            show(seen.panel("Latency, by script"), doctor=seen.doctor())
        show(seen.trace("demo", "sluice.quota.reserve"))


def slow_client(directory: Path) -> None:
    """One client reads nothing of its answer of 1,900 tokens, three read as they should."""
    with observatory(directory, "--write-timeout", "20", tenants=("deaf",)) as seen:
        deaf = deaf_client(seen.server, seen.keys["deaf"], max_tokens=1900)
        with clients(seen.server, seen.keys["demo"], 3, max_tokens=60), deaf:
            time.sleep(TROUBLE_SECONDS)
            show(seen.panel("Live requests"), seen.panel("KV bytes, by tenant"), doctor=seen.doctor())
            time.sleep(TROUBLE_SECONDS)
        show(seen.trace("deaf", "POST"))


TROUBLES: dict[str, Callable[[Path], None]] = {
    trouble.__name__: trouble for trouble in (noisy_tenant, kv_pressure, long_prefill, slow_redis, slow_client)
}


def show(*told: str, doctor: str = "") -> None:
    said = [*told, f"$ sluice doctor --live\n{doctor.rstrip()}"] if doctor else [*told]
    say("```\n" + "\n\n".join(said) + "\n```")


def say(text: str) -> None:
    print(f"{text}\n", flush=True)


def main() -> int:
    names = sys.argv[1:] or list(TROUBLES)
    if unknown := [name for name in names if name not in TROUBLES]:
        sys.exit(f"no such trouble: {', '.join(unknown)}; there are {', '.join(TROUBLES)}")
    for name in names:
        planted = " ".join((TROUBLES[name].__doc__ or "").split())
        say(f"## {name.replace('_', ' ').capitalize()}\n\n{planted}")
        with tempfile.TemporaryDirectory(prefix="sluice-") as directory:
            TROUBLES[name](Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
