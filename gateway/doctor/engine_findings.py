"""Findings about the engine: steps, batches, KV memory, the device."""

from admission.explain import REASONS
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.reasons import is_own_limit, is_paused, plain_reason
from gateway.doctor.snapshot import Snapshot, Window
from quotas.policy.units import counted, show_wait

FULL_SHARE_OF_POOL = 0.9  # of the KV blocks: admission's forecast holds back about the rest
SMALL_BATCH_SHARE = 0.5  # of max_num_seqs: below it a step reads all weights for under half of its rows
MIN_BUSY_SHARE = 0.7  # of the time: with work, two steps in flight keep a device busy for 0.95 of it
MIN_KEPT_SHARE_OF_POOL = 0.01  # of the KV blocks: less is negligible
PREEMPTED_SHARE = 0.05  # of sequences that join the batch: each is computed twice, so throughput drops by as much
MIN_PREEMPTIONS = 3.0  # fewer are expected of a forecast with a confidence of nine in ten
SLOWDOWN_RATIO = 3.0  # of a step with a prompt over one of decodes alone: less is no noticeable pause
NOTICED_GAP_SECONDS = 0.1  # between two tokens, noticeable to a reader; for classes without a target
LATE_TOKENS = 0.1  # of ended requests: targets hold for nine in ten
PLANNING_SHARE_OF_STEP = 0.05  # of a step: the design's bound
MISPRICED_SHARE_OF_STEP = 0.5  # of a step's time: even a shared machine is off by less in half of the steps
MIN_STEPS = 20.0  # below which means are noise
STALLED_SECONDS = 2.0  # without a step: longer than any but a huge step on a CPU

STEP = "sluice_step_duration_seconds"


def stalled(window: Window) -> Finding | None:
    active = [row for row in window.after.live if row["state"] in ("prefill", "decoding") and not is_paused(row)]
    if window.count(STEP) or not active or not window.both("running") or window.seconds < STALLED_SECONDS:
        return None
    return Finding(
        "device_stalled",
        "the device completes no step",
        f"{counted(round(window.both('running')), 'sequence')} ran for {window.seconds:.1f} s, "
        "and no step was completed",
        "the watchdog ends the process after --step-timeout; see the log for the device thread's state, and the "
        "device's own log (dmesg; nvidia-smi)",
        Severity.SERIOUS,
    )


def small_batches(window: Window) -> Finding | None:
    kv = min(window.before.kv_share, window.after.kv_share)
    size, most = window.mean("sluice_batch_size"), window.after.engine["max_num_seqs"]
    is_full = kv >= FULL_SHARE_OF_POOL or (_waits_for_memory(window.before) and _waits_for_memory(window.after))
    if not is_full or not window.both("waiting") or not 0 < size <= SMALL_BATCH_SHARE * most:
        return None
    kept = window.throughout("sluice_kv_blocks_kept") / window.after.engine["kv_blocks"]
    by_floors = f", {kept:.0%} kept idle by floors" if kept >= MIN_KEPT_SHARE_OF_POOL else ""
    rest = "" if kv >= FULL_SHARE_OF_POOL else "; the rest is held back for the answers that run"
    return Finding(
        "small_batches",
        "batches are small for lack of KV memory",
        f"{size:.0f} of {most} sequences in a step on average, {kv:.0%} of the KV blocks used{by_floors}, "
        f"{window.both('waiting'):.0f} waiting{rest}",
        "give KV memory more (--kv-memory-bytes), or have requests hold less: --max-model-len, --default-max-tokens, "
        "kv_bytes of the tenants that hold most",
    )


def preemptions(window: Window) -> Finding | None:
    lost = window.increase("sluice_preemptions_total", cause="memory")
    joined = window.increase("sluice_batch_joined_total")
    if lost < MIN_PREEMPTIONS or lost < PREEMPTED_SHARE * joined:
        return None
    recomputed = window.increase("sluice_recomputed_tokens_total")
    return Finding(
        "preemptions",
        "sequences are preempted and recomputed",
        f"{counted(round(lost), 'preemption')} in {window.seconds:.1f} s, "
        f"{counted(round(joined), 'sequence')} joined the batch in that time; "
        f"{counted(round(recomputed), 'token')} computed again",
        "lower --max-num-seqs, or raise --kv-memory-bytes; --admit forecast preempts least",
    )


def lost_steps(window: Window) -> Finding | None:
    lost = window.increase("sluice_lost_steps_total")
    if not lost:
        return None
    return Finding(
        "lost_steps",
        "steps exceed the device's memory",
        f"{lost:.0f} of {window.count(STEP) + lost:.0f} steps in {window.seconds:.1f} s were planned again with less",
        "lower --max-num-batched-tokens or --kv-memory-fraction, and check for other users of the device",
    )


def low_utilisation(window: Window) -> Finding | None:
    busy = window.increase("sluice_device_busy_seconds_total") / window.seconds
    waits = [row for row in window.after.waiting if not is_own_limit(row["reason"])]
    if busy >= MIN_BUSY_SHARE or not waits or not window.both("waiting") or window.count(STEP) < MIN_STEPS:
        return None
    lag = window.after.samples.total("sluice_loop_lag_seconds")
    return Finding(
        "low_utilisation",
        "the device is idle while work waits",
        f"it computed in {busy:.0%} of {window.seconds:.1f} s while {len(waits)} waited; the event loop was late by up "
        f"to {show_wait(lag)}",
        "leave the event loop a core of its own: lower --threads, or give the process more CPU; `sluice doctor` "
        "compares threads with cores",
    )


def long_prefills(window: Window) -> Finding | None:
    mixed = max(window.mean(STEP, kind=kind) for kind in ("mixed", "prefill"))
    decode = window.mean(STEP, kind="decode") or _since_start(window, "decode")
    target = _tightest_token_time(window) or NOTICED_GAP_SECONDS
    is_answering = window.count(STEP, kind="decode") or window.count(STEP, kind="mixed")
    if not is_answering or not decode or mixed < SLOWDOWN_RATIO * decode or mixed <= target:
        return None
    tokens = window.increase("sluice_prefill_tokens_total") / max(1.0, window.increase("sluice_prefill_chunks_total"))
    return Finding(
        "long_prefills",
        "long prompts make running answers pause",
        f"a step with a prompt in it takes {show_wait(mixed)} on average, one of decodes alone {show_wait(decode)}; "
        f"a token is due every {show_wait(target)}; {tokens:,.0f} prompt tokens in a chunk",
        "lower --prefill-chunk, or --prefill-share; a class with time_per_output_token in the policy has chunks cut "
        "to keep it",
    )


def slow_answers(window: Window) -> Finding | None:
    missed = window.increase("sluice_slo_misses_total", target="time_per_output_token")
    ended = window.increase("sluice_requests_total", outcome="completed")
    if missed < MIN_PREEMPTIONS or missed < LATE_TOKENS * ended:
        return None
    return Finding(
        "slow_answers",
        "answers come slower than their class promises",
        f"{missed:.0f} of {ended:.0f} that ended in {window.seconds:.1f} s had a longer time per token than its target",
        "lower --max-num-seqs or --max-num-batched-tokens, or spread the load over more replicas",
    )


def slow_planning(window: Window) -> Finding | None:
    planning, step = window.mean("sluice_planning_duration_seconds"), window.mean(STEP)
    if window.count(STEP) < MIN_STEPS or planning <= PLANNING_SHARE_OF_STEP * step:
        return None
    return Finding(
        "slow_planning",
        "the scheduler takes long to plan a step, and the device waits for it",
        f"{planning * 1e6:.0f} us for a step of {step * 1e3:.2f} ms; the bound is {PLANNING_SHARE_OF_STEP:.0%}",
        "give the process a faster or less busy core; `sluice doctor` says whether the scheduler is compiled",
    )


def prices_off(window: Window) -> Finding | None:
    drift = window.throughout("sluice_price_drift_ratio")
    if drift < MISPRICED_SHARE_OF_STEP:
        return None
    return Finding(
        "prices_off",
        "tenants are charged by prices that do not match the device",
        f"half of the steps that ran while the engine was idle missed their predicted times by {drift:.0%} or more",
        "prices are learned again from each of them, within minutes of idleness; if it stays, something else uses the "
        "device or its cores by fits and starts: give the engine its own, or fewer --threads",
    )


def _waits_for_memory(snapshot: Snapshot) -> bool:
    """True if most queued requests wait for memory: a pool of few blocks is full while some are free."""
    reasons = [plain_reason(row["reason"]) for row in snapshot.waiting]
    return 2 * reasons.count(REASONS["memory"]) > len(reasons)


def _since_start(window: Window, kind: str) -> float:
    samples = window.after.samples
    count = samples.total(f"{STEP}_count", kind=kind)
    return samples.total(f"{STEP}_sum", kind=kind) / count if count else 0.0


def _tightest_token_time(window: Window) -> float | None:
    """The shortest promised time between tokens among classes with live sequences."""
    present = {row["class"] for row in window.after.live}
    targets = (one.time_per_output_token for name, one in window.after.targets.items() if name in present)
    return min((target for target in targets if target is not None), default=None)
