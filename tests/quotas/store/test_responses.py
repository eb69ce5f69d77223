"""Stored responses: by tenant, for their time, within the tenant's bytes."""

import asyncio
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from quotas.errors import StoreUnavailable
from quotas.policy.policy import StoredResponseLimits
from quotas.store.account import state_key
from quotas.store.redis_store import RedisStore
from quotas.store.responses import ResponseStore
from quotas.store.scripts import Script, ScriptRunner
from quotas.stored import MAX_TURNS
from tests.examples import examples
from tests.quotas.servers import connected, hanging

ROOMY = StoredResponseLimits(10_000, 60.0)


async def test_a_conversation_is_read_as_its_turns_by_its_tenant_alone(
    store: RedisStore, other: RedisStore, tenant: str
) -> None:
    mine, theirs = store.responses(), other.responses()
    assert await mine.read(tenant, "a") is None
    for name, previous, contents in (("a", None, b"\x00\n first"), ("b", "a", b"second"), ("c", "b", b"")):
        assert await mine.store(tenant, name, previous, contents, ROOMY) == "ok"
    assert await theirs.read_turns(tenant, "c") == [b"\x00\n first", b"second", b""]
    assert await theirs.read(tenant, "b") == b"second"
    for name in ("c", "", "nobody's"):
        assert await theirs.read_turns(f"{tenant}-2", name) is await theirs.read(f"{tenant}-2", name) is None
    assert await mine.store(tenant, "c", "b", b"third", ROOMY) == "ok", "in place of what was there"
    assert await mine.read(tenant, "c") == b"third"
    assert not await theirs.delete(f"{tenant}-2", "a")
    assert await theirs.delete(tenant, "a") and await mine.delete(tenant, "a"), "whose first answer may be lost"
    assert not await mine.delete(tenant, "d")
    assert await mine.read_turns(tenant, "c") is None, "a turn is missing"
    assert await mine.read(tenant, "c") == b"third"


async def test_what_was_deleted_is_remembered_for_the_latest_calls_and_a_minute(
    store: RedisStore, store_url: str, tenant: str
) -> None:
    stored, count = store.responses(), 300
    for number in range(count):
        await stored.store(tenant, str(number), None, b"", StoredResponseLimits(10**6, 60.0))
        assert await stored.delete(tenant, str(number))
    assert await stored.delete(tenant, str(count - 1)) and not await stored.delete(tenant, "0")
    async with Redis.from_url(store_url) as redis:
        key = f"{state_key(tenant)}:responses:done"
        assert await redis.hlen(key) <= 257  # type: ignore[misc]
        assert 0 < await redis.pttl(key) <= 60_000


async def test_contents_are_stored_in_place_of_the_revision_that_was_read_alone(store: RedisStore, tenant: str) -> None:
    stored = store.responses()
    assert await stored.store(tenant, "c", "2", b"second", ROOMY, "1") == "changed", "there is none"
    assert await stored.store(tenant, "c", "1", b"first", ROOMY) == "ok"
    assert await stored.store(tenant, "c", "2", b"second", ROOMY, "1") == "ok"
    assert await stored.store(tenant, "c", "3", b"third", ROOMY, "1") == "changed"
    assert await stored.read(tenant, "c") == b"second"
    assert await stored.store(tenant, "c", "3", bytes(ROOMY.bytes), ROOMY, "2") == "too_large"
    assert await stored.read(tenant, "c") == b"second", "which nothing has replaced"


async def test_a_response_in_the_background_is_held_cancelled_and_found_lost(
    runner: ScriptRunner, valkey_url: str
) -> None:
    stored = ResponseStore(runner, 10.0)
    ask = partial(stored.ask_lease, "t")
    async with Redis.from_url(valkey_url) as redis:
        await redis.delete(f"{state_key('t')}:responses:open")
        await redis.set("test:clock", 10**9)
        assert await ask("open", "a", 2) == await ask("open", "a", 2) == await ask("open", "b", 2) == "ok"
        assert await ask("open", "c", 2) == "full"
        assert (
            await ask("look", "c") == await ask("cancel", "c") == await stored.ask_lease("t-2", "look", "a") == "lost"
        )
        assert await ask("look", "a") == "ok"
        assert await ask("cancel", "a") == await ask("run", "a") == await ask("look", "a") == "cancelled"
        assert await ask("run", "b") == await ask("hold", "b") == await ask("look", "b") == "running"
        assert await ask("close", "a") == await ask("open", "c", 2) == "ok"
        await redis.set("test:clock", 10**9 + 11 * 10**6)
        assert await ask("hold", "b") == "running", "nobody has found it lost"
        assert await ask("look", "c") == await ask("hold", "c") == "lost"
        assert await ask("look", "b") == "running"
        assert await ask("open", "d", 2) == "ok", "in place of the lost one"


async def test_a_conversation_of_more_turns_than_are_read_is_not_read_in_part(store: RedisStore, tenant: str) -> None:
    stored = store.responses()
    for turn in range(MAX_TURNS + 1):
        await stored.store(tenant, str(turn), str(turn - 1) if turn else None, b"", StoredResponseLimits(10**6, 60.0))
    turns = await stored.read_turns(tenant, str(MAX_TURNS - 1))
    assert turns is not None and len(turns) == MAX_TURNS
    assert await stored.read_turns(tenant, str(MAX_TURNS)) is None


async def test_a_response_larger_than_all_bytes_is_not_stored_and_others_stay(store: RedisStore, tenant: str) -> None:
    stored = store.responses()
    await stored.store(tenant, "a", None, b"small", ROOMY)
    assert await stored.store(tenant, "b", None, bytes(ROOMY.bytes), ROOMY) == "too_large"
    assert (await stored.read(tenant, "a"), await stored.read(tenant, "b")) == (b"small", None)


steps = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 120), st.integers(0, 40), st.sampled_from([0, 1, 29, 30])), max_size=25
)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps)
async def test_the_oldest_make_room_each_has_its_time_and_bytes_are_never_exceeded(
    runner: ScriptRunner, valkey_url: str, steps: list[tuple[int, int, int, int]]
) -> None:
    """Each step stores a response of some bytes for some seconds, and then some seconds pass."""
    most = 300
    stored, now, kept = ResponseStore(runner, 60.0), 1_000.0, dict[str, tuple[float, bytes]]()
    async with Redis.from_url(valkey_url) as redis:
        key = f"{state_key('t')}:responses"
        await redis.delete(key, f"{key}:order")
        for name, size, life, pause in steps:
            await redis.set("test:clock", round(now * 1e6))
            await stored.store("t", str(name), None, bytes(size), StoredResponseLimits(most, life + 1.0))
            kept = {one: said for one, said in kept.items() if said[0] > now}
            kept.pop(str(name), None)
            kept[str(name)] = now + life + 1.0, bytes(size)
            sizes = {one: len(f"{round(end * 1e6)}  ") + len(said) for one, (end, said) in kept.items()}
            while sum(sizes.values()) > most:
                oldest = min((end, one) for one, (end, _) in kept.items() if one != str(name))[1]
                del kept[oldest], sizes[oldest]
            total = await redis.hget(key, "")  # type: ignore[misc]
            assert int(total) == sum(sizes.values()) <= most
            now += pause
            await redis.set("test:clock", round(now * 1e6))
            for one in map(str, range(8)):
                end, contents = kept.get(one, (0.0, b""))
                assert await stored.read("t", one) == (contents if end > now else None)


@pytest.mark.parametrize("is_over", [False, True])
async def test_no_call_forgets_more_responses_than_take_the_store_a_moment(
    runner: ScriptRunner, valkey_url: str, is_over: bool
) -> None:
    """Of one large response that many small ones make room for, or after the time of all is over."""
    roomy, most_forgotten, count = StoredResponseLimits(300_000, 60.0), 500, 1_200
    stored = ResponseStore(runner, 60.0)
    kept = [count]
    async with Redis.from_url(valkey_url) as redis:
        key = f"{state_key('t')}:responses"
        await redis.delete(key, f"{key}:order")
        await redis.set("test:clock", 10**9)
        await asyncio.gather(*(stored.store("t", str(number), None, b"small", roomy) for number in range(count)))
        run_once = runner.run_once

        async def counted(script: Script, packed: bytes) -> list[bytes]:
            answer = await run_once(script, packed)
            kept.append(await redis.zcard(f"{key}:order"))
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "run_once", counted)
            await redis.set("test:clock", 10**9 + is_over * 61 * 10**6)
            assert await stored.store("t", "large", None, bytes(299_000), roomy) == "ok"
            assert await stored.read("t", "large") == bytes(299_000)
        names = await redis.zrange(f"{key}:order", 0, -1)
        sizes = [await redis.hstrlen(key, name) for name in names]  # type: ignore[misc]
        assert int(await redis.hget(key, "")) == sum(sizes) <= roomy.bytes  # type: ignore[misc]
    assert max(before - after for before, after in pairwise(kept)) <= most_forgotten
    assert kept[-1] < count / 10


async def test_a_store_that_does_not_answer_is_unavailable(url: str, tenant: str) -> None:
    async with connected(url) as store, hanging(url):
        with pytest.raises(StoreUnavailable):
            await store.responses().read(tenant, "a")
