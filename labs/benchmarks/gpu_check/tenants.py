"""Tenants of one gateway, over HTTP, with its store, a policy and traces: they get what they were promised.

Streams that are dropped free their memory within the steps in flight; HTTP costs little beside the same requests
offline; a flooding tenant has its share and no more, and a light tenant hardly notices; decodes keep their rhythm
beside a long prompt; and an admitted request with a deadline has its first token in time, by calibrated step times.
"""

import gc
import json
import lzma
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from random import Random
from statistics import mean

import torch

from admission.event_logs.event_log import replay
from admission.event_logs.numbers import in_seconds
from admission.step_times.step_time import StepTime, StepWork
from backend.model.model_config import ModelConfig
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import Sequence
from backend.sizing import DEVICE_TOKEN_BUDGET
from labs.benchmarks.gpu_check import requests
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.first_tokens import FirstToken, first_tokens, lines_since
from labs.benchmarks.gpu_check.floors import measured_roofline, step_floor
from labs.benchmarks.gpu_check.models import SHAPES
from labs.benchmarks.gpu_check.tenant_server import INTERVAL, TIER, WEIGHTS, TenantServer, tenant_server
from labs.benchmarks.load import OK, Clients, all_at_once
from labs.benchmarks.report import quantile
from labs.benchmarks.traffic import ClosedLoop, Due, Exchange, Traffic

OF_OFFLINE = 0.9
OFF_SHARE = 0.05  # of each tenant's share
SLOWED = 2.0  # times a light tenant's wait alone
RELEASE_STEPS = 2
STREAMED = 1500  # most tokens of streams that are dropped before they end, of which all fit the memory at once
MISSED = 0.01  # of admitted requests
OF_CHUNK_FLOOR = 1.5
OVERLOAD = 1.3  # of capacity
DEADLINE_STEPS = (25, 50, 100)  # full steps, until the first token
REFUSALS = (429, 503, 504)
GIVEN_UP = 504
DESCRIPTORS = 65_536
MOMENTS = 100  # requests whose phases are told
PHASES = ("body", "reserve", "queue", "prefill", "first token")


@dataclass(frozen=True, slots=True)
class Plan:
    shape: str
    seats: int
    dropped: int  # streams
    staying: int  # streams beside them
    streams: dict[str, int]  # of tenants that always have more to ask
    prompts: tuple[int, int]  # tokens, least and most
    answers: tuple[int, int]
    light: tuple[float, int, int]  # requests a second, tokens of their prompts and of their answers
    alone: float  # seconds of the light tenant alone
    lead: float  # seconds before shares are measured
    window: float  # seconds in which they are
    paced: int  # streams beside the long prompt
    long_prompt: int
    deadlines: float  # seconds of requests with deadlines

    @property
    def model(self) -> ModelConfig:
        return SHAPES[self.shape]

    @property
    def length(self) -> int:
        """Tokens of a context."""
        return self.long_prompt + 1024 if self.shape != "tiny" else self.model.max_position


GPU = Plan(
    shape="Qwen3-0.6B",
    seats=256,
    dropped=128,
    staying=16,
    streams={"flood": 512, "second": 192, "heavy": 320},
    prompts=(100, 1000),
    answers=(20, 200),
    light=(10, 1000, 16),
    alone=6,
    lead=5,
    window=20,
    paced=64,
    long_prompt=32_768,
    deadlines=30,
)
SMALL = Plan(
    shape="tiny",
    seats=4,
    dropped=3,
    staying=1,
    streams={"flood": 12, "second": 4, "heavy": 8},
    prompts=(5, 20),
    answers=(4, 12),
    light=(5, 10, 2),
    alone=1,
    lead=1,
    window=2,
    paced=2,
    long_prompt=400,
    deadlines=2,
)


def check(device: torch.device) -> Iterator[Finding]:
    plan = GPU if device.type == "cuda" else SMALL
    if absent := requests.missing():
        yield Finding("tenants over HTTP", f"skipped: needs {', '.join(absent)}")
        return
    _raise_limit()
    floor, offline = _chunk_floor(plan, device), _offline(device)
    gc.collect()
    torch.cuda.empty_cache()
    with tenant_server(plan.model, device, plan.seats, plan.length) as server:
        phases = _Phases(plan, server)
        yield from phases.drop_streams()
        yield from phases.hold_against(offline, device)
        yield from phases.share()
        yield from phases.pace(floor)
        yield from phases.keep_deadlines()


def _raise_limit() -> None:
    """As many connections as there are streams, here and in the gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _offline(device: torch.device) -> float:
    """Tokens a second of the requests of `requests`, in this process."""
    return next(float(found.value) for found in requests.check_offline(device) if found.unit == "tok/s")


def _chunk_floor(plan: Plan, device: torch.device) -> float:
    """Seconds of a full step beside the paced streams that ends the long prompt."""
    chunk = min(plan.long_prompt, DEVICE_TOKEN_BUDGET - plan.paced)
    starts = [sum(plan.prompts)] * plan.paced + [plan.long_prompt - chunk]
    step = Batch(0, plan.paced, list(range(plan.paced + 1)), starts, [1] * plan.paced + [chunk])
    return step_floor(measured_roofline(plan.model, device), step)


class _Phases:
    """The phases of one gateway's run, in turn."""

    def __init__(self, plan: Plan, server: TenantServer) -> None:
        self._plan, self._server, self._random = plan, server, Random(0)

    # streams that are dropped

    def drop_streams(self) -> Iterator[Finding]:
        plan, port = self._plan, self._server.port
        longest = min(STREAMED, plan.length - plan.prompts[1] - 1)
        with Clients(port, plan.staying) as staying:
            for connection in staying.connections:
                connection.send(self._ask("heavy", tokens=longest))
            with Clients(port, plan.dropped) as dropped:
                dropped.begin_streams(repeat(self._ask("flood", tokens=longest)))
            steps = _steps_to_release(self._server.event_log, plan.dropped)
        what = f"{plan.dropped} streams dropped: steps until their KV memory is free"
        yield Finding(what, steps, bound=RELEASE_STEPS, exact=True)

    # beside the same requests offline

    def hold_against(self, offline: float, device: torch.device) -> Iterator[Finding]:
        _, asked = requests.workload(device)
        bodies = [self._server.asked("heavy", prompt, tokens) for prompt, tokens in asked]
        all_at_once(self._server.port, bodies[:2])
        seconds, _ = all_at_once(self._server.port, bodies)
        rate = sum(tokens for _, tokens in asked) / seconds
        what = f"{self._plan.shape}, {len(asked)} requests over HTTP with store, policy and traces"
        yield Finding(f"{what}: output tokens/s", rate, "tok/s")
        yield Finding(f"{what}: of those offline", rate / offline, bound=OF_OFFLINE, sense=">=")

    # shares

    def share(self) -> Iterator[Finding]:
        plan, (rate, _, _) = self._plan, self._plan.light
        with Traffic(self._server.port, REFUSALS) as clients:
            alone = clients.run(plan.alone + 60, self._light(0, plan.alone), until_answered=True)
        loops = {tenant: ClosedLoop(count, self._asks(tenant)) for tenant, count in plan.streams.items()}
        end, begun = plan.lead + plan.window, self._server.event_log.stat().st_size
        with Traffic(self._server.port, REFUSALS) as clients, ThreadPoolExecutor(1) as thread:
            shares = thread.submit(self._shares)
            beside = clients.run(end, self._light(plan.lead, end), loops)
            found = shares.result()
        fair = {tenant: WEIGHTS[tenant] for tenant in plan.streams}
        off = {tenant: found[tenant] / (weight / sum(fair.values())) - 1 for tenant, weight in fair.items()}
        for tenant, count in plan.streams.items():
            told = f"{tenant}, {count} streams, weight {WEIGHTS[tenant]}: share of the device"
            yield Finding(told, found[tenant])
        worst = max(map(abs, off.values()))
        yield Finding(f"furthest from a share, over {plan.window:g} s", worst, bound=OFF_SHARE)
        waits = [quantile(heard.waits("light"), 0.95) for heard in (alone, beside)]
        who = f"light tenant, {rate:g} requests/s"
        what = f"{who}: p95 first token"
        yield Finding(f"{what}, alone", waits[0] * 1e3, "ms")
        yield Finding(f"{what}, beside the flood", waits[1] * 1e3, "ms")
        yield Finding(f"{what}, beside / alone", waits[1] / waits[0], bound=SLOWED)
        medians = [quantile(heard.waits("light"), 0.5) for heard in (alone, beside)]
        yield Finding(f"{who}: median first token, alone, beside", _milliseconds(medians), "ms")
        came, steps = first_tokens(lines_since(self._server.event_log, begun))
        yield from _explain([one for one in came if one.tenant == "light" and one.came is not None])
        if moments := self._server.moments("light", MOMENTS):  # they are written twice a second
            told = ", ".join(f"{what} {1e3 * mean(one[what] for one in moments):.1f}" for what in PHASES)
            yield Finding("  its phases, from the first byte at the gateway: means", told, "ms")
        yield Finding("mean step beside the flood", 1e3 * sum(steps) / max(1, len(steps)), "ms")
        yield Finding("share of a core that the clients used", beside.busy)

    def _shares(self) -> dict[str, float]:
        """Return each tenant's share of the time of all tenants that always have more to ask, within the window."""
        time.sleep(self._plan.lead)
        before = self._server.served()
        time.sleep(self._plan.window - 1)  # and a second for what this takes
        after = self._server.served()
        served = {tenant: after[tenant] - before[tenant] for tenant in self._plan.streams}
        return {tenant: seconds / sum(served.values()) for tenant, seconds in served.items()}

    def _light(self, begin: float, end: float) -> list[Due]:
        rate, prompt, tokens = self._plan.light
        count = int((end - begin) * rate)
        return [Due(begin + n / rate, "light", self._ask("light", prompt, tokens)) for n in range(count)]

    # rhythm

    def pace(self, floor: float) -> Iterator[Finding]:
        plan, answer = self._plan, self._plan.length - self._plan.long_prompt
        with Clients(self._server.port, plan.paced + 1) as clients:
            *streams, long = clients.connections
            for connection in streams:
                connection.send(self._ask("paced", tokens=answer, tier=TIER))
            while not all(connection.num_events > 2 for connection in streams):
                _receive(clients)
            long.send(self._ask("heavy", plan.long_prompt, 1))
            while long.num_events == 0:
                _receive(clients)
        gaps = sorted(
            after - before
            for connection in streams
            for before, after in pairwise(connection.event_times)
            if after > long.sent_at
        )
        what = f"{plan.long_prompt:,} tokens beside {plan.paced} streams"
        yield Finding(f"{what}: first token of the prompt", long.event_times[0] - long.sent_at, "s")
        yield Finding(f"{what}: floor of a full step at its end", floor * 1e3, "ms")
        bound = max(INTERVAL, OF_CHUNK_FLOOR * floor) * 1e3
        yield Finding(f"{what}: p99 between tokens", quantile(gaps, 0.99) * 1e3, "ms", bound=bound)

    # deadlines

    def keep_deadlines(self) -> Iterator[Finding]:
        plan, random = self._plan, self._random
        capacity, step = self._capacity(), self._full_step()
        choices = [max(0.25, steps * step) for steps in DEADLINE_STEPS]
        due, at, limits = list[Due](), 0.0, list[float]()
        while (at := at + random.expovariate(OVERLOAD * capacity)) < plan.deadlines:
            limits.append(random.choice(choices))
            due.append(Due(at, "second", self._ask("second", x_sluice_ttft_ms=round(limits[-1] * 1e3))))
        begun, before = self._server.event_log.stat().st_size, self._server.waited()
        with Traffic(self._server.port, REFUSALS) as clients:
            heard = clients.run(plan.deadlines + 60, due, until_answered=True)
        told = ", ".join(f"{after - since:.2f}" for since, after in zip(before, self._server.waited(), strict=True))
        yield Finding("meanwhile the engine's threads waited for a core, and the machine for its own", told, "s")
        admitted = [pair for pair in zip(heard.exchanges, limits, strict=True) if _was_admitted(pair[0])]
        late = [(one, limit) for one, limit in admitted if one.first is None or one.first - one.sent > limit]
        what = f"{len(due)} requests with deadlines at {OVERLOAD:g} of capacity"
        told = ", ".join(f"{limit:.2f}" for limit in choices)
        yield Finding(f"{what}: seconds to the first token", told)
        yield Finding(f"{what}: admitted", len(admitted) / max(1, len(due)))
        yield Finding(f"{what}: admitted and missed", len(late) / max(1, len(admitted)), bound=MISSED)
        yield from self._explain_late(late, begun)
        self._keep_log(begun)

    def _keep_log(self, begun: int) -> None:
        """Keep the event log of this phase in the folder from which files come back, if `scripts/gpu_box` names one."""
        if kept := os.environ.get("SLUICE_GPU_OUT"):
            with (
                self._server.event_log.open("rb") as log,
                lzma.open(Path(kept) / "deadlines.xz", "wb", preset=0) as out,
            ):
                log.seek(begun)
                shutil.copyfileobj(log, out)

    def _explain_late(self, late: list[tuple[Exchange, float]], begun: int) -> Iterator[Finding]:
        by_limit = Counter(f"{limit:.2f}" for _, limit in late)
        yield Finding("missed: by their deadlines", ", ".join(f"{n} of {limit} s" for limit, n in by_limit.items()))
        over = sorted(one.first - one.sent - limit for one, limit in late if one.first is not None)
        told = f"{len(late) - len(over)}; {_milliseconds([quantile(over, 0.5), over[-1]]) if over else 'none'}"
        yield Finding("missed: without a token; late, median and most", told, "ms")
        came, _ = first_tokens(lines_since(self._server.event_log, begun))
        idle = sorted(_idle(lines_since(self._server.event_log, begun)))
        told = _milliseconds([quantile(idle, 0.99), *idle[-1:]])
        yield Finding("device idle between steps: p99, longest", told, "ms")
        dated = [one for one in came if one.by is not None]
        slack = sorted(one.by - one.came for one in dated if one.by is not None and one.came is not None)
        if slack:
            told = _milliseconds([quantile(slack, share) for share in (0.0, 0.01, 0.05, 0.5)])
            yield Finding("left by the engine's clock: least, p1, p5, median", told, "ms")

    def _capacity(self) -> float:
        """The capacity in requests a second, with twice as many requests as seats."""
        plan = self._plan
        with Traffic(self._server.port, REFUSALS) as clients:
            heard = clients.run(2 * plan.lead, loops={"second": ClosedLoop(2 * plan.seats, self._asks("second"))})
        late = sum(one.done is not None and one.done > plan.lead for one in heard.exchanges)
        return max(1, late) / (heard.seconds - plan.lead)

    def _full_step(self) -> float:
        """Predicted seconds of a step with a full budget beside decodes in half of the seats."""
        plan, cost = self._plan, self._server.state()["step"]
        decodes = plan.seats // 2
        work = StepWork(decode_tokens=decodes, decode_context=decodes * sum(plan.prompts) // 2)
        return StepTime(tuple(cost["coefficients"]), cost["knee"]).seconds(work.with_prefill(0, DEVICE_TOKEN_BUDGET))

    # requests

    def _asks(self, tenant: str) -> Iterator[bytes]:
        while True:
            yield self._ask(tenant)

    def _ask(
        self, tenant: str, prompt: int | None = None, tokens: int | None = None, tier: str = "auto", **headers: object
    ) -> bytes:
        """A request whose prompt begins like no other's."""
        random, plan = self._random, self._plan
        length = random.randint(*plan.prompts) if prompt is None else prompt
        most = random.randint(*plan.answers) if tokens is None else tokens
        token_ids = random.choices(range(min(10_000, plan.model.vocab_size)), k=length)
        return self._server.asked(tenant, token_ids, most, tier, **headers)


def _idle(lines: Iterable[str]) -> Iterator[float]:
    """Yield the seconds between a step's end and the next one's start, by the engine's clock."""
    ended = None
    for _, now, _, elapsed, *_ in (json.loads(line) for line in lines if line.startswith('["done"')):
        if ended is not None:
            yield in_seconds(now - ended - elapsed)
        ended = now


def _milliseconds(seconds: Iterable[float]) -> str:
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds)


def _explain(came: list[FirstToken]) -> Iterator[Finding]:
    """Yield the waits of their first tokens in the engine; the rest is the gateway's and HTTP's."""
    if not came:
        return
    waits = sorted(one.waited for one in came)
    told = _milliseconds([quantile(waits, 0.5), quantile(waits, 0.95)])
    yield Finding("its first token by the engine's clock: median, p95", told, "ms")
    parts = [sum(part) / len(came) for part in zip(*(one.parts for one in came), strict=True)]
    yield Finding("  until planned, then begun, then done: means", _milliseconds(parts), "ms")
    steps = sorted(Counter(one.steps for one in came).items())
    told = ", ".join(f"{count}: {number}" for count, number in steps)
    yield Finding("  steps that they waited for: requests", told)


def _was_admitted(exchange: Exchange) -> bool:
    return exchange.status in (OK, GIVEN_UP)


def _receive(clients: Clients) -> None:
    for connection in clients.readable(30):
        connection.receive()


def _steps_to_release(event_log: Path, count: int, seconds: float = 30) -> int:
    """The most steps that were completed from the end of a sequence that was cancelled until it held no block, of
    `count`, by the log of a gateway that runs.
    """
    until = time.perf_counter() + seconds
    while True:
        steps = _released_after(event_log.read_text().splitlines(keepends=True), count)
        if steps is not None:
            return steps
        if time.perf_counter() > until:
            raise TimeoutError(f"the event log does not say that {count} streams have released their memory")
        time.sleep(0.5)


def _released_after(lines: Iterable[str], count: int) -> int | None:
    """The same; None while fewer have released their memory."""
    sequences: dict[str, Sequence] = {}
    held: dict[str, int] = {}  # by id, steps since it was cancelled
    worst = released = 0
    for entry in replay((line for line in lines if line.endswith("\n")), sequences):
        if entry[0] == "finish" and entry[3] == "cancelled":
            held[entry[2]] = 0
        if entry[0] == "done":
            held = {name: steps + 1 for name, steps in held.items()}
        for name in [name for name in held if not sequences[name].block_table.blocks]:
            worst, released = max(worst, held.pop(name)), released + 1
    return worst if released >= count and not held else None
