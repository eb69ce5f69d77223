import asyncio
from contextlib import suppress

from gateway.tenants.kept_usage import KeptUsage
from quotas.reservation import Usage

KEPT = {"a": 1.0, "b": 0.5}  # blocks for each second


class Store:
    def __init__(self) -> None:
        self.booked: list[tuple[str, str | None, Usage]] = []

    def book(self, tenant: str, key: str | None, usage: Usage) -> None:
        self.booked.append((tenant, key, usage))

    def total(self, tenant: str) -> float:
        return sum(usage.kv_byte_seconds for name, _, usage in self.booked if name == tenant)


class Rig:
    def __init__(self) -> None:
        self.store, self.now = Store(), 0.0
        self.usage = KeptUsage(
            lambda now: {tenant: blocks * now for tenant, blocks in KEPT.items()}, self.store, 10, lambda: self.now
        )


def test_kept_usage_is_booked_without_a_key_or_a_request() -> None:
    rig = Rig()
    rig.usage.book()
    assert rig.store.booked == []
    rig.now = 3.0
    rig.usage.book()
    assert rig.store.booked == [
        ("a", None, Usage(kv_byte_seconds=30, requests=0)),
        ("b", None, Usage(kv_byte_seconds=15, requests=0)),
    ]


def test_nothing_is_lost_between_bookings() -> None:
    rig = Rig()
    for step in range(1, 1001):
        rig.now = step * 0.013
        rig.usage.book()
    assert (rig.store.total("a"), rig.store.total("b")) == (130, 65)
    assert all(usage.kv_byte_seconds == round(usage.kv_byte_seconds) for _, _, usage in rig.store.booked)


async def test_the_rest_is_booked_as_the_server_ends() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.usage.run())
    await asyncio.sleep(0)
    rig.now = 2.0
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert rig.store.total("a") == 20
