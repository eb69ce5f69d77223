import pytest

from backend.paged_kv.block_names import BlockName
from tests.gateway.telemetry.metrics_rig import BLOCK_BYTES, Rig

NAMES = [BlockName(ordinal) for ordinal in range(40)]


def names(first: int, count: int) -> list[BlockName]:
    return NAMES[first : first + count]


def test_pinned_blocks_are_on_their_tenants_account_and_add_up_over_time(rig: Rig) -> None:
    rig.core.pin_prefixes("acme", names(0, 2), rig.now)
    rig.arrive("a", prompt=12, names=names(0, 3))
    rig.run()
    before = rig.now
    rig.now += 10
    page = rig.page()
    assert (page.value("sluice_kv_blocks_pinned"), page.value("sluice_kv_blocks_kept")) == (2, 0)
    assert page.value("sluice_kv_pinned_bytes", tenant="acme") == 2 * BLOCK_BYTES
    assert page.value("sluice_kv_charged_bytes", tenant="acme") == 2 * BLOCK_BYTES
    assert page.value("sluice_kv_cached_bytes", tenant="acme") == BLOCK_BYTES
    kept = 2 * (rig.now - before)  # beside what requests held, which are told with their records
    assert page.value("sluice_kv_byte_seconds_total", tenant="acme") == pytest.approx(kept * BLOCK_BYTES)


def test_a_shared_block_is_one_block_and_charged_to_each_of_its_tenants(rig: Rig) -> None:
    rig.arrive("a", prompt=9, max_tokens=20, names=names(0, 2))
    rig.step()
    rig.step()
    rig.arrive("b", prompt=9, max_tokens=20, tenant="zeta", names=names(0, 2))
    rig.arrive("c", prompt=9, max_tokens=20, tenant="zeta", names=names(0, 2))
    rig.step()
    page = rig.page()
    assert page.value("sluice_kv_blocks_shared") == 2
    assert page.value("sluice_kv_blocks_used") == 2 + 3, "what they share, and a block of each"
    assert page.value("sluice_kv_bytes", tenant="acme") == 3 * BLOCK_BYTES
    assert page.value("sluice_kv_bytes", tenant="zeta") == 4 * BLOCK_BYTES


def test_nothing_is_looked_for_where_the_cache_is_off() -> None:
    rig = Rig(prefix_cache=False)
    rig.arrive("a", prompt=9, names=names(0, 2))
    rig.run()
    page = rig.page()
    assert page.value("sluice_prefix_cache_queries_total") == page.value("vllm:prefix_cache_queries_total") == 0
    assert page.value("sluice_kv_blocks_cached") == 0


@pytest.mark.parametrize("num_host_blocks", [0, 3])
def test_evicted_blocks_are_swapped_while_the_host_has_room(num_host_blocks: int) -> None:
    rig = Rig(num_blocks=8, num_host_blocks=num_host_blocks)
    rig.arrive("a", prompt=20, max_tokens=2, names=names(0, 5))
    rig.run()
    rig.arrive("b", prompt=28, max_tokens=2, tenant="zeta", names=names(10, 7))
    rig.run()
    page = rig.page()
    given_up = page.value("sluice_prefix_cache_evictions_total")
    assert given_up > num_host_blocks
    assert page.value("sluice_kv_host_blocks") == num_host_blocks
    assert page.value("sluice_kv_host_blocks_used") == num_host_blocks
    assert page.value("sluice_kv_swapped_bytes", tenant="acme" if num_host_blocks else "other") == (
        num_host_blocks * BLOCK_BYTES
    )
    out, declined = (
        page.value("sluice_kv_swapped_blocks_total", to="host"),
        page.value("sluice_kv_swaps_declined_total"),
    )
    assert out + declined == (given_up if num_host_blocks else 0)


def test_allocated_and_unused_slots_are_known_by_tenant(rig: Rig) -> None:
    rig.arrive("a", prompt=6, max_tokens=9)
    rig.step()
    page = rig.page()
    assert page.value("sluice_kv_wasted_bytes", tenant="acme") == 2 * BLOCK_BYTES / 4
