"""A gateway with tenants, over a model of random weights: its store, a policy and traces are on.

The gateway's own packages are imported only when a gateway is asked for, because not every machine has their
dependencies.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from backend.model.model_config import ModelConfig
from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.gpu_check.models import write_checkpoint
from labs.benchmarks.load import post
from labs.benchmarks.processes import Worker, free_port

NAME = "random"
WEIGHTS = {"flood": 1, "second": 1, "heavy": 2, "light": 1, "paced": 1}
TIER, INTERVAL = "priority", 0.05  # requests of this tier are promised this time between tokens, seconds
POLICY = """
classes:
  paced: {{service_tiers: [{tier}], time_per_output_token: {interval_ms:.0f}ms}}
  plain: {{service_tiers: [flex]}}
defaults: {{default_class: plain, limits: {{requests: 100M/min, tokens: 4B/min}}}}
tenants:
"""
ADMIN_TIMEOUT_SECONDS = 30  # for an answer of the admin port
SINK = (sys.executable, "-m", "labs.benchmarks.span_sink")


@dataclass(frozen=True, slots=True)
class TenantServer:
    """A gateway that runs."""

    port: int
    pid: int  # of the engine's process
    keys: Mapping[str, str]  # by tenant
    event_log: Path
    admin: str  # URL
    admin_key: str

    def asked(self, tenant: str, prompt: list[int], tokens: int, tier: str = "auto", **headers: object) -> bytes:
        """A streaming request whose answer has exactly `tokens` tokens."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.6, "stream": True}
        further = {"ignore_eos": True, "skip_special_tokens": False, "service_tier": tier}
        return post("/v1/completions", body | further, self.keys[tenant], **headers)

    def served(self) -> dict[str, float]:
        """Seconds of the device that each tenant was charged for."""
        return {row["name"]: row["service_seconds"] for row in self._read("tenants")["tenants"]}

    def state(self) -> dict[str, Any]:
        return self._read("state")

    def moments(self, tenant: str, count: int) -> list[dict[str, float]]:
        """Seconds from the beginning of each of the tenant's latest requests to the start of its phases, by phase."""
        rows = self._read(f"request-log?tenant={tenant}&limit={count}")["requests"]
        timelines = [self._read(f"requests/{row['response_id']}")["timeline"] for row in rows]
        return [{span["what"]: span["at"] for span in timeline} for timeline in timelines]

    def waited(self) -> tuple[float, float]:
        """Seconds for which its threads wanted a core, and for which this machine's cores were others'."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
        return sum(int(file.read_text().split()[1]) for file in threads) / 1e9, stolen

    def _read(self, what: str) -> dict[str, Any]:
        url = f"{self.admin}/admin/v1/{what}"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {self.admin_key}"})
        with urllib.request.urlopen(request, timeout=ADMIN_TIMEOUT_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def tenant_server(model: ModelConfig, device: torch.device, seats: int, length: int) -> Iterator[TenantServer]:
    """Run a server with `seats` slots, for contexts of `length` tokens."""
    make_keys = import_module("labs.benchmarks.served").make_keys
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        checkpoint, state, policy, events = (folder / name for name in (NAME, "state", "policy.yaml", "events"))
        checkpoint.mkdir()
        write_checkpoint(replace(model, max_position=max(length, model.max_position)), checkpoint, device)
        lines = [f"  {tenant}: {{weight: {weight}}}\n" for tenant, weight in WEIGHTS.items()]
        policy.write_text(POLICY.format(tier=TIER, interval_ms=1e3 * INTERVAL) + "".join(lines))
        keys, admin_port = make_keys(state, WEIGHTS), free_port()
        settings: dict[str, Any] = {
            "model": checkpoint,
            "device": device.type,
            "max_num_seqs": seats,
            "max_model_len": length,
            "policy": policy,
            "event_log": events,
            "event_log_bytes": 2**30,
            "admin_port": admin_port,
            "max_waiting": 100_000,
            "refused_per_second": 1_000_000,
            "drain_timeout": 1,
            "otlp_protocol": "http",
            "trace_sample_ratio": 1,
        }
        with Worker(SINK, None) as sink:
            settings["otlp_endpoint"] = f"http://127.0.0.1:{sink.ready['port']}"
            with gateway_process(state, **settings) as process:
                admin_key = (state / "admin-key").read_text().strip()
                yield TenantServer(process.port, process.pid, keys, events, f"http://127.0.0.1:{admin_port}", admin_key)
