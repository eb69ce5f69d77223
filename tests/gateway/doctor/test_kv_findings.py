from admission.explain import REASONS
from gateway.doctor.findings import past_findings
from tests.gateway.doctor.snapshots import BEFORE, HEALTHY, found, snapshot, waits

MEMORY, SLOTS = REASONS["memory"], REASONS["slots"]
QUERIES, HITS = "sluice_prefix_cache_queries_total", "sluice_prefix_cache_hits_total"
EVICTIONS = "sluice_prefix_cache_evictions_total"
EARLIER = {QUERIES: 1_000_000.0, HITS: 400_000.0}  # two fifths were found


def test_hits_that_are_lost_while_blocks_are_given_up() -> None:
    lost = {QUERIES: 1_010_000.0, HITS: 400_500.0, EVICTIONS: 600.0}
    finding = found(lost, EARLIER)["thrashing"]
    assert finding.evidence == (
        "600 cached blocks were given up in 5.0 s, of a pool of 100; "
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
        "30 of 100 KV blocks were idle and kept by floors all the time, most of them for zeta (3.0 MiB), "
        "while 1 of others waited for memory"
    )
    assert "prefix_cache.floor of zeta" in finding.remedy
    assert "starving_floor" not in found(kept, waiting=(waits(MEMORY),)), "it was not so all the time"
    assert "starving_floor" not in found(kept, kept, waiting=(waits(SLOTS),))
    assert "starving_floor" not in found(kept, kept, waiting=(waits(MEMORY, tenant="zeta"),)), "its own to give"
    few = kept | {"sluice_kv_blocks_kept": 5.0}
    assert "starving_floor" not in found(few, few, waiting=(waits(MEMORY),))


def test_thrashing_minutes_ago_is_told() -> None:
    lost = {QUERIES: 1_010_000.0, HITS: 400_500.0, EVICTIONS: 600.0}
    then, now = snapshot(160.0, BEFORE | EARLIER), snapshot(400.0, HEALTHY | lost)
    (finding,) = past_findings(160.0, then.samples, now)
    assert finding.name == "thrashing"
    assert finding.evidence.startswith("in the last 4 min: 600 cached blocks were given up")
