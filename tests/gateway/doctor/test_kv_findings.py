from admission.explain import REASONS
from gateway.doctor.finding import Finding
from gateway.doctor.findings import findings, past_findings, past_window
from tests.gateway.doctor.snapshots import BEFORE, HEALTHY, found, snapshot, tenant, waits

MEMORY, SLOTS = REASONS["memory"], REASONS["slots"]
QUERIES, HITS = "sluice_prefix_cache_queries_total", "sluice_prefix_cache_hits_total"
EVICTIONS = "sluice_prefix_cache_evictions_total"
EARLIER = {QUERIES: 1_000_000.0, HITS: 400_000.0}  # two fifths were found


def test_hits_that_are_lost_while_blocks_are_given_up() -> None:
    lost = {QUERIES: 1_010_000.0, HITS: 400_500.0, EVICTIONS: 600.0}
    finding = found(lost, EARLIER)["thrashing"]
    assert finding.evidence == (
        "600 cached blocks were evicted in 5.0 s, of a pool of 100; "
        "5% of the prompt tokens were found in the prefix cache, 40% before"
    )
    assert "prefix_cache.floor" in finding.remedy
    assert "thrashing" not in found(lost | {EVICTIONS: 9.0}, EARLIER), "a full cache gives up what is oldest"
    assert "thrashing" not in found(lost | {HITS: 403_000.0}, EARLIER), "as many were found as before, nearly"
    assert "thrashing" not in found(lost | {"sluice_batch_joined_total": 109.0}, EARLIER), "nine may all be different"
    assert "thrashing" not in found(lost, {QUERIES: 50_000.0, HITS: 20_000.0}), "nobody knows what is usual yet"
    assert "thrashing" not in found(EARLIER | {EVICTIONS: 600.0}, EARLIER), "nothing was looked for"


def test_preemptions_whose_memory_is_given_up_before_they_return() -> None:
    again = {
        EVICTIONS: 50.0,
        "sluice_prefill_tokens_total": 4_000.0,
        "sluice_recomputed_tokens_total": 1_000.0,
    }
    finding = found(again)["thrashing"]
    assert "1,000 of 4,000 tokens of prefills were computed again after a preemption" in finding.evidence
    assert "prefix cache" not in finding.evidence
    assert "thrashing" not in found(again | {EVICTIONS: 0.0})
    assert "thrashing" not in found(again | {"sluice_recomputed_tokens_total": 300.0})


def test_a_cache_that_never_hits() -> None:
    never = {QUERIES: 200_000.0, HITS: 320.0, "sluice_kv_blocks_cached": 57.0}
    finding = found(never)["cache_never_hits"]
    assert finding.evidence == "320 of 200,000 prompt tokens were found since the start; 57 idle blocks are cached"
    assert "cache_salt" in finding.remedy and "--prefix-cache off" in finding.remedy
    assert "cache_never_hits" not in found(never | {HITS: 4_000.0})
    assert "cache_never_hits" not in found(never | {QUERIES: 50_000.0}), "too few prompts to say"
    assert "cache_never_hits" not in found({HITS: 0.0, QUERIES: 0.0}), "it is off"
    assert "cache_never_hits" not in found(never, never), "nobody asks for anything"


def test_a_floor_that_starves_others() -> None:
    kept = {"sluice_kv_blocks_kept": 30.0, 'sluice_kv_kept_bytes{tenant="zeta"}': 3 * 2.0**20}
    kept |= {'sluice_kv_kept_bytes{tenant="other"}': 0.0}
    finding = found(kept, kept, waiting=(waits(MEMORY),))["starving_floor"]
    assert finding.evidence == (
        "30 of 100 KV blocks were idle and kept by floors throughout, most of them for zeta (3.0 MiB), "
        "while 1 of others waited for memory"
    )
    assert "prefix_cache.floor of zeta" in finding.remedy
    assert "starving_floor" not in found(kept, waiting=(waits(MEMORY),)), "it was not so all the time"
    assert "starving_floor" not in found(kept, kept, waiting=(waits(SLOTS),))
    assert "starving_floor" not in found(kept, kept, waiting=(waits(MEMORY, tenant="zeta"),)), "its own to give"
    few = kept | {"sluice_kv_blocks_kept": 5.0}
    assert "starving_floor" not in found(few, few, waiting=(waits(MEMORY),))


def pins(before: dict[str, int], after: dict[str, int]) -> dict[str, Finding]:
    rows = [(tenant("acme", **one), tenant("zeta", requests=99)) for one in (before, after)]
    diagnosed = findings(*(snapshot(at, HEALTHY, tenants=row) for at, row in zip((10.0, 20.0), rows, strict=True)))
    return {finding.name: finding for finding in diagnosed}


def test_a_pin_that_no_request_begins_with() -> None:
    pinned = {"pinned_blocks": 12, "requests": 40}
    finding = pins(pinned, pinned)["pin_never_hits"]
    assert finding.evidence == (
        "the prompts pinned for acme, of 12 blocks, were found 0 times since the start, and not lately; nothing is "
        "kept for 40 requests"
    )
    assert "prefix_cache.pinned of acme" in finding.remedy
    assert "pin_never_hits" not in pins(pinned, pinned | {"running": 1}), "it may hold it"
    assert "pin_never_hits" not in pins(pinned, pinned | {"requests": 9})
    assert "pin_never_hits" not in pins(pinned, pinned | {"pinned_reuses": 4}), "it gave way at a limit"


def test_a_pin_that_is_kept_and_not_found() -> None:
    kept = {"pinned_blocks": 12, "kv_pinned_bytes": 3 * 2**20, "pinned_reuses": 2}
    finding = pins(kept | {"requests": 5}, kept | {"requests": 16})["pin_never_hits"]
    assert "found 2 times since the start, and not lately; 3.0 MiB are kept for 16 requests" in finding.evidence
    assert "pin_never_hits" not in pins(kept | {"requests": 5}, kept | {"requests": 9}), "few others were asked"
    assert "pin_never_hits" not in pins(kept | {"requests": 5}, kept | {"requests": 16, "pinned_reuses": 3})


def test_thrashing_minutes_ago_is_told() -> None:
    lost = {QUERIES: 1_010_000.0, HITS: 400_500.0, EVICTIONS: 600.0}
    then, now = snapshot(160.0, BEFORE | EARLIER), snapshot(400.0, HEALTHY | lost)
    (finding,) = past_findings(past_window(160.0, then.samples, now))
    assert finding.name == "thrashing"
    assert finding.evidence.startswith("in the last 4 min: 600 cached blocks were evicted")
