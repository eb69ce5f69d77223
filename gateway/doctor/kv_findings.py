"""Findings about cached KV memory: blocks evicted too soon, never hit again, or idle while requests need memory."""

from admission.explain import REASONS
from gateway.doctor.finding import Finding
from gateway.doctor.reasons import plain_reason
from gateway.doctor.snapshot import Json, Snapshot, Window
from quotas.policy.units import counted

RECOMPUTED_SHARE = 0.1  # of the tokens of prefills: twice what preemptions may cost, see `PREEMPTED_SHARE`
LOST_HITS_SHARE = 0.5  # of earlier hits: a smaller loss is the workload's variation
MIN_HIT_SHARE = 0.05  # of the prompt tokens, before: with fewer hits there is little to lose
EVICTED_SHARE_OF_POOL = 0.1  # of the pool's blocks: less is a full cache's normal turnover
UNSHARED_HIT_SHARE = 0.01  # of the prompt tokens: chance hits of similar prompts
MIN_PROMPT_TOKENS = 100_000.0  # of prompts, to judge their beginnings; in `thrashing`, also before
MIN_JOINED_SEQUENCES = 10.0  # fewer sequences prove nothing
MIN_REQUESTS = 10  # of a tenant, none with a pinned prompt
STARVING_SHARE_OF_POOL = 0.1  # of the pool's blocks: with less, memory would be full anyway

JOINED = "sluice_batch_joined_total"
QUERIES, HITS = "sluice_prefix_cache_queries_total", "sluice_prefix_cache_hits_total"


def thrashing(window: Window) -> Finding | None:
    """Blocks are evicted and their tokens computed again, by the preempted sequence or by the prompt's next turn."""
    given_up, joined = window.increase("sluice_prefix_cache_evictions_total"), window.increase(JOINED)
    if given_up < EVICTED_SHARE_OF_POOL * window.after.engine["kv_blocks"] or joined < MIN_JOINED_SEQUENCES:
        return None
    found_before, found = _hit_share(window), _hits(window)
    prefilled, again = window.increase("sluice_prefill_tokens_total"), window.increase("sluice_recomputed_tokens_total")
    loses_hits = (
        found_before >= MIN_HIT_SHARE and found < LOST_HITS_SHARE * found_before and bool(window.increase(QUERIES))
    )
    recomputes = again > 0 and again >= RECOMPUTED_SHARE * prefilled
    if not (loses_hits or recomputes):
        return None
    hits = f"; {found:.0%} of the prompt tokens were found in the prefix cache, {found_before:.0%} before"
    recomputed = f"; {again:,.0f} of {prefilled:,.0f} tokens of prefills were computed again after a preemption"
    return Finding(
        "thrashing",
        "cached KV memory is evicted and recomputed",
        f"{given_up:,.0f} cached blocks were evicted in {window.seconds:.1f} s, of a pool of "
        f"{window.after.engine['kv_blocks']:,}{hits * loses_hits}{recomputed * recomputes}",
        "give KV memory more (--kv-memory-bytes), lower --max-num-seqs, or keep what matters: a tenant's "
        "prefix_cache.floor in the policy",
    )


def cache_never_hits(window: Window) -> Finding | None:
    samples = window.after.samples
    asked, found = samples.total(QUERIES), samples.total(HITS)
    if asked < MIN_PROMPT_TOKENS or found >= UNSHARED_HIT_SHARE * asked or not window.increase(QUERIES):
        return None
    return Finding(
        "cache_never_hits",
        "the prefix cache has hardly any hits",
        f"{found:,.0f} of {asked:,.0f} prompt tokens were found since the start; "
        f"{samples.total('sluice_kv_blocks_cached'):,.0f} idle blocks are cached",
        "see that clients send the same cache_salt with each request of a conversation, or none, and that prompts do "
        "not begin with a changing text, such as a date; if all prompts differ, --prefix-cache off saves the work",
    )


def starving_floor(window: Window) -> Finding | None:
    kept, blocks = window.throughout("sluice_kv_blocks_kept"), window.after.engine["kv_blocks"]
    keeper, its_bytes = _keeper(window.after)
    waiting = min(_waits_for_memory(window.before, keeper), _waits_for_memory(window.after, keeper))
    if kept < STARVING_SHARE_OF_POOL * blocks or not waiting:
        return None
    return Finding(
        "starving_floor",
        "floors keep memory idle while other tenants wait for it",
        f"{kept:,.0f} of {blocks:,} KV blocks were idle and kept by floors throughout, most of them for {keeper} "
        f"({its_bytes / 2**20:,.1f} MiB), while {waiting} of others waited for memory",
        f"lower prefix_cache.floor of {keeper} in the policy, or give KV memory more (--kv-memory-bytes)",
    )


def pin_never_hits(window: Window) -> Finding | None:
    """Pinned prompts are never computed, as no request has them, or never hit again."""
    before = {row["name"]: row for row in window.before.tenants}
    found = [row for row in window.after.tenants if _is_pinned_in_vain(before.get(row["name"]), row)]
    if not found:
        return None
    row = found[0]
    others = f", and those of {len(found) - 1} more" if len(found) > 1 else ""
    kept = f"{row['kv_pinned_bytes'] / 2**20:,.1f} MiB are kept" if row["kv_pinned_bytes"] else "nothing is kept"
    return Finding(
        "pin_never_hits",
        "pinned prompts are never hit",
        f"the prompts pinned for {row['name']}{others}, of {counted(row['pinned_blocks'], 'block')}, were found "
        f"{counted(row['pinned_reuses'], 'time')} since the start, and not lately; "
        f"{kept} for {counted(row['requests'], 'request')}",
        f"see that prefix_cache.pinned of {row['name']} equals the system message of its requests word for word (a "
        "line's end and cache_salt count, and a chat template may put tools or a date before it), or leave it out of "
        "the policy; pins above kv_bytes are not kept either",
    )


def _is_pinned_in_vain(before: Json | None, row: Json) -> bool:
    """True if a tenant has pinned prompts and no request hit them."""
    if before is None or not row["pinned_blocks"] or row["running"]:
        return False
    if not row["kv_pinned_bytes"]:
        return bool(not row["pinned_reuses"] and row["requests"] >= MIN_REQUESTS)
    is_unused = before["kv_pinned_bytes"] and before["pinned_reuses"] == row["pinned_reuses"]
    return bool(is_unused and row["requests"] - before["requests"] >= MIN_REQUESTS)


def _hits(window: Window) -> float:
    """The hit share of the prompt tokens in the window."""
    return window.increase(HITS) / max(1.0, window.increase(QUERIES))


def _hit_share(window: Window) -> float:
    """The hit share of the prompt tokens before the window; 0 if they were too few."""
    samples = window.before.samples
    asked = samples.total(QUERIES)
    return samples.total(HITS) / asked if asked >= MIN_PROMPT_TOKENS else 0.0


def _keeper(snapshot: Snapshot) -> tuple[str, float]:
    """The tenant whose floor keeps most, and the bytes of it."""
    series = snapshot.samples.series.get("sluice_kv_kept_bytes", [])
    kept = [(value, labels.get("tenant", "")) for labels, value in series]
    most, name = max(kept, default=(0.0, ""))
    return name, most


def _waits_for_memory(snapshot: Snapshot, keeper: str) -> int:
    """The number of other tenants' requests that wait for memory."""
    rows = [row for row in snapshot.waiting if row["tenant"] != keeper]
    return sum(plain_reason(row["reason"]) == REASONS["memory"] for row in rows)
