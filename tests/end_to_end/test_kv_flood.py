"""Tenants with limits and floors of KV memory under a flood, over HTTP and a real device, and checked at every step.

The steps are those of the server: its event log is decided again to the byte, by a core that can be looked into.
"""

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import backend
from admission.controller import Controller
from admission.event_logs import event_log
from backend.scheduler.scheduled_step import WaitReason
from gateway.telemetry.event_log_file import read_event_log
from tests.gateway.server_process import eventually
from tests.gateway.tenant_site import TenantSite, tenant_site

BLOCK, OUTPUT = 16, 40  # tokens
LONGEST = 5 * BLOCK + 5 + OUTPUT
LIMITS, FLOORS = (
    {"limited": 1100, "both": 1300},
    {"both": 360, "floored": 400},
)  # KiB; a floor holds five blocks of all layers
POLICY = f"""
tenants:
  limited: {{limits: {{kv_bytes: {LIMITS["limited"]}KiB}}}}
  both: {{limits: {{kv_bytes: {LIMITS["both"]}KiB}}, prefix_cache: {{floor: {FLOORS["both"]}KiB}}}}
  floored: {{prefix_cache: {{floor: {FLOORS["floored"]}KiB}}}}
  flood: {{}}
"""
FLAGS = ("--kv-memory-bytes", "3MiB", "--max-model-len", "128", "--max-num-seqs", "16", "--refused-per-second", "10000")


class Site(TenantSite):
    def ask(self, tenant: str, prompt: list[int]) -> int:
        """Have a whole answer; returns how much of the prompt was found."""
        extra = {"ignore_eos": True}
        with self.client(tenant) as client:
            reply = client.completions.create(model="embedded", prompt=prompt, max_tokens=OUTPUT, extra_body=extra)
        assert reply.usage is not None and reply.usage.completion_tokens == OUTPUT
        return reply.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr,return-value]


def a_prompt(rng: random.Random, shared: list[int]) -> list[int]:
    begin = shared[: BLOCK * rng.randint(0, 3)]
    return begin + [rng.randrange(5, 500) for _ in range(BLOCK * rng.randint(0, 2) + 5)]


def flooded(site: Site, has_window: bool) -> None:
    """Everybody is answered, in full, and what a floor keeps is found when all is over; with a window a floor keeps as
    many blocks, though perhaps some of a text without those of its window.
    """
    rng = random.Random(3)
    shared = {tenant: [rng.randrange(5, 500) for _ in range(3 * BLOCK)] for tenant in site.keys}
    asked = [tenant for tenant in site.keys for _ in range(30 if tenant == "flood" else 10)]
    rng.shuffle(asked)
    with ThreadPoolExecutor(24) as clients:
        answers = [clients.submit(site.ask, tenant, a_prompt(rng, shared[tenant])) for tenant in asked]
        for answer in answers:
            answer.result()
    kept = {tenant: [*shared[tenant], 7] for tenant in FLOORS}
    for tenant, prompt in kept.items():
        site.ask(tenant, prompt)
    for _ in range(20):
        site.ask("flood", a_prompt(rng, shared["flood"][:0]))
    found = [site.ask(tenant, prompt) for tenant, prompt in kept.items()]
    assert has_window or found == [3 * BLOCK] * len(FLOORS)
    eventually(site.server.is_idle)


def with_a_window(folder: Path) -> Path:
    """Return the embedded model's checkpoint, whose layers see 32 tokens."""
    shutil.copytree(Path(backend.__file__).parent / "embedded", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["all", pytest.param("a window", marks=pytest.mark.nightly)])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The whole log of a server that has stopped after the flood, and the bytes of a block. Its layers see all of a
    text, or a window.
    """
    folder = tmp_path_factory.mktemp("flood")
    log = folder / "events.log"
    model = () if request.param == "all" else ("--model", f"embedded={with_a_window(folder / 'model')}")
    with tenant_site(Site, folder, POLICY, *FLAGS, *model, f"--event-log={log}") as site:
        flooded(site, has_window=bool(model))
        block_bytes = site.server.admin("kv")["block_bytes"]
    return log, block_bytes


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Controller]:
    """The requests of a replay."""
    made: list[Controller] = []
    make = event_log.make_logged_core

    def looked_into(*arguments: Any, **options: Any) -> Any:
        core, log = make(*arguments, **options)
        made.append(core)
        return core, log

    monkeypatch.setattr(event_log, "make_logged_core", looked_into)
    return made


def test_under_a_flood_limits_and_floors_hold_at_every_step_and_everybody_is_answered(
    recorded: tuple[Path, int], cores: list[Controller]
) -> None:
    log, block_bytes = recorded
    most = {tenant: size * 1024 // block_bytes for tenant, size in LIMITS.items()}
    least = {tenant: -(-size * 1024 // block_bytes) for tenant, size in FLOORS.items()}
    paused, was_denied, steps, was_short = set[str](), set[str](), 0, False
    for entry in event_log.replay(list(read_event_log(log))):
        scheduler = cores[0].scheduler
        kv, config = scheduler.kv_manager, scheduler.config
        assert all(blocks >= config.kv_blocks(LONGEST) for blocks in most.values()), (
            "a limit holds the longest sequence"
        )
        if config.window_groups:
            scheduler.check_integrity()
        for tenant, blocks in most.items():
            held = kv.allowances.held[tenant]
            assert held <= blocks, f"{tenant} holds {held} blocks of the {blocks} of its limit"
            assert held <= (kv.allowances.allowed(tenant) or 0), f"{tenant} holds more than it has a lease for"
        was_denied |= kv.allowances.requested.keys()
        was_short |= scheduler.wait_reason is WaitReason.MEMORY or scheduler.counters.preemptions > 0
        kept = sum(min(blocks, kv.cache.num_idle_of(tenant)) for tenant, blocks in least.items())
        assert kv.blocks.num_available == config.num_blocks - kv.num_held - kept, "what a floor keeps is nobody's"
        for step in scheduler.in_flight:
            assert set(step.paused.values()) <= {WaitReason.ALLOWANCE}, "one was paused for others"
            paused |= {sequence.tenant for sequence in step.paused}
        steps += entry[0] == "done"
    assert steps > 100 and kv.cache.evictions > 100 and was_short
    assert paused <= LIMITS.keys() == was_denied
    assert not kv.running and not kv.num_held
