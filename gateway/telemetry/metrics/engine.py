"""Metrics of the engine: steps, batches, memory and work, and how fast a disconnect frees KV blocks."""

from collections.abc import Callable, Mapping
from itertools import islice

from admission.controller import Controller
from admission.ledger import work_of
from admission.outcome import Outcome
from admission.step_times.step_time import StepTimeModel, StepWork
from backend.roofline import Roofline
from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduler import Scheduler
from gateway.replica.reader import ReplicaReader
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.metrics.registry import Family, Kind, Point, Registry
from gateway.telemetry.request_record import RequestRecord, SequenceTimeline

# upper bounds of buckets, in seconds unless said otherwise
STEP_DURATION = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
PLANNING_DURATION = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # sequences
TOKEN_JITTER = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
DISCONNECT = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class EngineMetrics:
    """Counts steps and batches; `memory` returns the device's memory in bytes, by use."""

    def __init__(
        self,
        registry: Registry,
        core: Controller,
        memory: Callable[[], Mapping[str, float]],
        roofline: Roofline | None = None,
    ) -> None:
        self._scheduler, self._step_times, self._roofline = core.scheduler, core.step_times, roofline
        self._busy = self._floor = 0.0
        self._of_mixed = {"prefill": 0.0, "decode": 0.0}  # seconds
        self._completed, self._decodes = 0.0, 0  # of the last step
        self._gap = 0.0  # between the last two tokens of rows that decoded in both last steps; 0: none did
        self._count_steps(registry)
        self._count_batches(registry)
        self._count_memory(registry, memory)
        idle = core.idle_calibration
        registry.total("sluice.calibration.steps", "Steps run for their time while idle.", lambda: idle.num_steps)
        registry.gauge("sluice.price.drift", "How far recent ones were off their predictions.", lambda: idle.drift, "1")

    def _count_steps(self, registry: Registry) -> None:
        durations = registry.histogram("sluice.step.duration", "Device time of a step.", STEP_DURATION, ("kind",))
        self._prefill, self._decode, self._mixed = (durations.at(kind) for kind in ("prefill", "decode", "mixed"))
        self._planning = registry.histogram(
            "sluice.planning.duration", "Time of the event loop to plan a step.", PLANNING_DURATION
        ).at()
        registry.total("sluice.device.busy", "Device time of all steps.", lambda: self._busy, "s")
        registry.total("sluice.device.floor", "The least time of the same steps.", lambda: self._floor, "s")
        phases = Family("sluice.mixed_steps", Kind.COUNTER, "s", "Device time of mixed steps, by phase.", ("phase",))
        registry.read(phases, lambda: [((phase,), seconds) for phase, seconds in self._of_mixed.items()])
        self._jitter = registry.histogram(
            "sluice.token.jitter", "Difference of a gap between two tokens from the gap before.", TOKEN_JITTER
        ).at()

    def _count_batches(self, registry: Registry) -> None:
        counters, config = self._scheduler.counters, self._scheduler.config
        self._sizes = registry.histogram("sluice.batch.size", "Sequences in a step.", BATCH_SIZE, unit="").at()
        registry.gauge("sluice.batch.size_max", "The most sequences in a step.", lambda: config.max_num_seqs)
        registry.total("sluice.batch.joined", "Sequences that joined the batch.", lambda: counters.admissions)
        registry.total("sluice.batch.left", "Sequences that left the batch.", self._num_left)
        self._chunks = registry.counter("sluice.prefill.chunks", "Parts of prompts computed.").at()
        self._prefill_tokens = registry.counter("sluice.prefill.tokens", "Tokens computed in prefills.").at()
        self._decode_tokens = registry.counter("sluice.decode.tokens", "Tokens computed in decodes.").at()
        registry.total(
            "sluice.late_tokens", "Tokens sampled after their sequence had ended.", lambda: counters.late_tokens
        )
        registry.total("sluice.padding_tokens", "Tokens computed as padding.", lambda: counters.padding_tokens)
        registry.total("sluice.recomputed_tokens", "Tokens computed again.", lambda: counters.recomputed_tokens)
        preemptions = Family("sluice.preemptions", Kind.COUNTER, "", "Sequences that lost their memory.", ("cause",))
        registry.read(preemptions, self._preemptions)
        registry.total("sluice.lost_steps", "Steps the device had no memory for.", lambda: counters.lost_steps)

    def _count_memory(self, registry: Registry, memory: Callable[[], Mapping[str, float]]) -> None:
        uses = Family("sluice.device.memory", Kind.GAUGE, "By", "Memory of the model.", ("use",))
        registry.read(uses, lambda: [((use,), held) for use, held in memory().items()])

    def _preemptions(self) -> list[Point]:
        counts = zip(("memory", "slot", "limit", "step"), self._scheduler.counters.all_preemptions, strict=True)
        return [((cause,), count) for cause, count in counts]

    def stepped(self, step: CompletedStep) -> None:
        """Count a completed step, in O(1) but for summing the lengths of its prefills, and what windows hide."""
        batch, elapsed = step.scheduled.batch, step.elapsed
        decodes, rows = step.num_decodes, len(batch.slots)
        self._planning.observe(step.scheduled.planning)
        self._sizes.observe(rows)
        self._busy += elapsed
        self._decode_tokens.value += step.decode_tokens
        if rows == decodes:
            self._decode.observe(elapsed)
        else:
            (self._mixed if decodes else self._prefill).observe(elapsed)
            self._chunks.value += rows - decodes
            self._prefill_tokens.value += step.prefill_tokens
        self._count_work(step, work_of(step.scheduled))
        if decodes:
            self._note_gap(step.completed, decodes)
        else:  # rows that sat out a step of prefills alone have the longer gap
            self._decodes = max(0, min(self._decodes, len(self._scheduler.running) - rows))

    def _count_work(self, step: CompletedStep, work: StepWork) -> None:
        """Add the step's floor, and divide a mixed step's time by what its prompts and its answers cost apart."""
        batch, elapsed = step.scheduled.batch, step.elapsed
        if self._roofline is not None:
            tokens, context = work.prefill_tokens + work.decode_tokens, work.decode_context + work.prefill_context
            prefills = islice(zip(batch.starts, batch.lengths, strict=True), batch.num_decodes, None)
            beyond = self._roofline.beyond_window(islice(batch.starts, batch.num_decodes), prefills)
            drawn = len(batch.sampled) + sum([len(draft) for _, draft in batch.drafts])
            self._floor += self._roofline.step(tokens, drawn, context, work.prefill_pairs, beyond)
        if 0 < step.num_decodes < len(batch.slots):
            seconds, decoding = self._step_times[batch.model].fitted.seconds, work.decode_tokens
            whole, fixed = seconds(work), seconds(StepWork())
            alone = seconds(StepWork(0, decoding, work.decode_context))
            share = (whole - alone) / (whole - fixed) if whole != fixed else 0.5
            self._of_mixed["prefill"] += share * elapsed
            self._of_mixed["decode"] += (1 - share) * elapsed

    def _note_gap(self, completed: float, decodes: int) -> None:
        """Compare the gap between this step's tokens and the last decodes with the gap before it."""
        gap, rows = completed - self._completed, min(decodes, self._decodes)
        if rows and self._gap:
            self._jitter.observe(abs(gap - self._gap), rows)
        self._gap = gap if rows else 0.0
        self._completed, self._decodes = completed, decodes

    def _num_left(self) -> int:
        return self._scheduler.counters.admissions - len(self._scheduler.running)


def show_kv(registry: Registry, scheduler: Scheduler) -> None:
    """Show blocks of KV memory, a shared block once, and the counts of the prefix cache."""
    kv, counters, config = KVAccounts(scheduler.kv_manager), scheduler.counters, scheduler.config
    holdings, swapping = scheduler.kv_manager.blocks.holdings, scheduler.kv_manager.blocks.swapping
    registry.gauge("sluice.kv.blocks", "KV blocks in the pool.", lambda: config.num_blocks)
    registry.gauge("sluice.kv.blocks_used", "KV blocks held by sequences.", lambda: kv.num_held)
    registry.gauge("sluice.kv.blocks_shared", "KV blocks with several holders.", lambda: holdings.num_shared)
    registry.gauge("sluice.kv.blocks_cached", "Idle KV blocks: cached, without a holder.", lambda: kv.cache.num_idle)
    registry.gauge("sluice.kv.blocks_kept", "Idle KV blocks kept by floors.", lambda: kv.cache.num_floored)
    registry.gauge("sluice.kv.blocks_pinned", "Idle KV blocks kept by pins.", lambda: kv.cache.num_pinned)
    registry.gauge("sluice.kv.host_blocks", "KV blocks for which the host has room.", lambda: kv.host.num_blocks)
    registry.gauge("sluice.kv.host_blocks_used", "KV blocks that the host has.", lambda: kv.host.num_used)
    registry.total(
        "sluice.prefix_cache.queries", "Prompt tokens looked for in the prefix cache.", lambda: kv.num_queried_tokens
    )
    registry.total(
        "sluice.prefix_cache.hits", "Prompt tokens found in the prefix cache.", lambda: counters.cached_tokens
    )
    registry.total("sluice.prefix_cache.evictions", "Idle KV blocks evicted.", lambda: kv.cache.evictions)
    swapped = Family("sluice.kv.swapped_blocks", Kind.COUNTER, "", "KV blocks copied to or from the host.", ("to",))
    registry.read(swapped, lambda: [(("host",), counters.swapped_out), (("device",), counters.swapped_in)])
    registry.total("sluice.kv.swaps_declined", "KV blocks the host did not take.", lambda: swapping.declined)


TERMS = ("step", "prefill", "decode", "decode_context", "prefill_context", "prefill_pairs", "beyond_knee")
"""The names of the coefficients of `StepTime`, in their order."""


def show_work(registry: Registry, replica: ReplicaReader, model: StepTimeModel) -> None:
    """Show what replicas are compared and scaled by: the work of each, and the cost of its steps."""

    def coefficients() -> list[Point]:
        return [((term,), value) for term, value in zip(TERMS, model.fitted.coefficients, strict=True)]

    registry.gauge("sluice.work", "Predicted engine time of all that runs and waits.", replica.work_seconds, "s")
    registry.gauge("sluice.replicas_wanted", "That work, over its target for one replica.", replica.replicas_wanted)
    each = Family("sluice.step_time.coefficient", Kind.GAUGE, "s", "Seconds of a unit of a step's work.", ("term",))
    registry.read(each, coefficients)


class DisconnectMetrics:
    """Measures the time from a disconnect to the end of its sequences and to the release of their KV blocks.

    `num_orphans` counts sequences in the engine without a request.
    """

    def __init__(self, registry: Registry, num_orphans: Callable[[], int]) -> None:
        self._stop = registry.histogram(
            "sluice.disconnect.to_stop", "From a disconnect to the end of its sequences.", DISCONNECT
        ).at()
        self._release = registry.histogram(
            "sluice.disconnect.to_release", "From a disconnect to the release of its KV blocks.", DISCONNECT
        ).at()
        registry.gauge("sluice.orphans", "Sequences that no request waits for.", num_orphans)
        self._releasing: dict[SequenceTimeline, float] = {}  # when their clients went

    def ended(self, record: RequestRecord) -> None:
        gone = record.scope.ended_early if record.scope is not None else None
        if gone is None or record.outcome is not Outcome.DISCONNECTED:
            return
        for timeline in record.engine.timelines:
            if timeline.ended is None or timeline.ended < gone:
                continue  # its answer was complete before
            self._stop.observe(timeline.ended - gone)
            if timeline.released is None:
                self._releasing[timeline] = gone
            else:
                self._release.observe(timeline.released - gone)

    def released(self, timeline: SequenceTimeline) -> None:
        gone = self._releasing.pop(timeline, None)
        if gone is not None and timeline.released is not None:
            self._release.observe(timeline.released - gone)
