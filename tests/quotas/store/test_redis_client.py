import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from backend.bound_process import bound
from gateway.background import beside
from quotas.errors import StoreFault, StoreUnavailable, StoreUnsuitable
from quotas.policy.limit import Alert, Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.policy.policy import StoredResponseLimits
from quotas.quotas import Quotas
from quotas.reservation import Ask, Attempt, Delivered, Reservation, Usage
from quotas.store import redis_client
from quotas.store.batches import FinishedLine
from quotas.store.budget_alerts import DueAlert
from quotas.store.redis_client import RedisClient
from quotas.store.redis_link import RedisLink, command
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import LUA, Script
from tests.gateway.server_process import eventually
from tests.interrupted import assert_ends_when_cancelled
from tests.ports import free_port
from tests.quotas.servers import BINARIES, connected, hanging, running, until_connected
from tests.quotas.stores import usage_by_key

LIMITS = (Limit(Resource.TOKENS, 1000, Rate(3600, 1000)), Limit(Resource.CONCURRENT_REQUESTS, 10))


async def reserved(store: RedisStore) -> Reservation:
    return await store.reserve("a", None, LIMITS, Ask(1, 100, 100))


async def left(store: RedisStore) -> list[int]:
    return [state.remaining for state in await store.states("a", None, LIMITS)]


async def test_a_hanging_store_fails_calls_and_nothing_is_lost_when_it_wakes(url: str) -> None:
    async with connected(url) as store:
        held = await reserved(store)
        async with hanging(url):
            with pytest.raises(StoreUnavailable):
                await reserved(store)
            assert not store.is_connected
            with pytest.raises(StoreUnavailable):
                await reserved(store)
            await store.settle(held, Usage(100, 50))
        await until_connected(store)
        await store.heartbeat()
        assert await left(store) == [850, 10]


@pytest.mark.parametrize("stalls", [[1.5], [0.4] * 4], ids=["once", "again and again"])
async def test_a_loop_that_stands_still_does_not_blame_the_store(url: str, stalls: list[float]) -> None:
    """100 calls are out while this process does nothing for many times the timeout."""
    async with connected(url, timeout=0.25) as store:
        calls = [asyncio.create_task(store.states(f"t{number}", None, LIMITS)) for number in range(100)]
        await asyncio.sleep(0)  # all are sent
        for stall in stalls:
            time.sleep(stall)  # noqa: ASYNC251 - the fault itself
            await asyncio.sleep(0)
        assert len(await asyncio.gather(*calls)) == 100
        assert store.num_outages == 0


async def test_a_loop_that_stands_still_finds_out_a_store_that_hangs(url: str) -> None:
    async with connected(url) as store:
        async with hanging(url):
            call = asyncio.create_task(left(store))
            while not call.done():
                await asyncio.sleep(0)
                time.sleep(0.03)  # noqa: ASYNC251 - the fault itself
            with pytest.raises(StoreUnavailable, match="did not answer within 100 ms"):
                await call
        await until_connected(store)


async def test_commands_that_go_out_together_have_one_future_and_their_answers_in_order(url: str) -> None:
    client = RedisClient(url, timeout=5.0)
    await client.connect()
    wrong = [command(b"SET", b"text", b"1"), command(b"HGETALL", b"text"), command(b"GET", b"text")]
    for _ in range(2):
        set_, error, got = await client.send_all(wrong)
        assert (set_, got) == (b"OK", b"1") and isinstance(error, ResponseError), "a key of another type"
        with pytest.raises(StoreFault, match="unknown command"):
            await client.send_all([*wrong, command(b"NONE")])
        left = asyncio.create_task(client.send_all(wrong[::2] * 100))
        await asyncio.sleep(0)
        left.cancel()
        assert await client.send_all(wrong[::2]) == [b"OK", b"1"]
    assert await client.send_all([]) == []
    await client.close()


async def test_a_store_whose_answers_keep_coming_is_not_late() -> None:
    ended = Mock()
    link = RedisLink(Mock(), 1.0, ended)
    answers, stuck = link.submit_all([b"-"] * 3), link.submit_all([b"-"] * 2)
    for _ in range(4):
        link._attended += 10.0
        link._check()
        ended.assert_not_called()
        link.data_received(b"+yes\r\n")
    assert await answers == [b"yes"] * 3
    link._check()
    link._check()
    with pytest.raises(StoreUnavailable, match="did not answer within 1000 ms"):
        await stuck


async def test_a_broken_connection_is_made_anew_within_the_call(url: str) -> None:
    async with connected(url) as store, Redis.from_url(url) as redis:
        for _ in range(3):
            await redis.client_kill_filter(_type="normal", skipme=True)
            await store.settle(await reserved(store), Usage(100, 0))
        assert await left(store) == [700, 10]


async def unserving(redis: Redis, how: str, directory: Path) -> None:
    """Have the server refuse writes while it answers."""
    match how:
        case "NOREPLICAS":
            await redis.config_set("min-replicas-to-write", 1)
        case "OOM":
            await redis.config_set("maxmemory", 1)
        case "MISCONF":
            (directory / "dump.rdb").mkdir()  # where the dump would go, which cannot take its place
            await redis.config_set("save", "3600 1")
            await redis.set("something", "to save")
            await redis.bgsave()
            while (await redis.info("persistence"))["rdb_last_bgsave_status"] != "err":
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["NOREPLICAS", "OOM", "MISCONF"])
async def test_a_store_that_answers_and_takes_no_writes_is_no_connected_one(
    url: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "PROBE_SECONDS", 0.02)
    async with connected(url) as store, Redis.from_url(url) as redis:
        store.returned.clear()
        before = await redis.config_get("save", "maxmemory", "min-replicas-to-write")
        await unserving(redis, how, tmp_path)
        assert store.is_connected, "nobody has asked it for anything yet"
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=f"does not serve.*{how}" if how != "OOM" else "does not serve"):
                await reserved(store)
            assert not store.is_connected
        assert store.num_outages == 1
        for name, value in before.items():
            await redis.config_set(name, value)
        await store.returned.wait()
        assert store.is_connected
        await store.settle(await reserved(store), Usage(100, 0))


async def test_an_unreachable_store_fails_at_once(tmp_path: Path) -> None:
    store = RedisStore.at(f"unix://{tmp_path}/none.sock")
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await store.connect()
    with pytest.raises(StoreUnavailable):
        await left(store)
    await store.close()


async def test_a_store_that_refuses_the_login_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "CONNECT_SECONDS", 0.05)
    path = tmp_path / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        store = RedisStore.at(f"unix://{path}")
        with pytest.raises(StoreUnavailable, match=r"no connection within 0\.05 s"):
            await store.connect()
        await store.close()


async def test_a_store_that_evicts_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with running(BINARIES["valkey"], tmp_path, "--maxmemory-policy", "volatile-lru") as url:
        store = RedisStore.at(url)
        with pytest.raises(StoreUnsuitable, match="set it to noeviction"):
            await store.connect()
        await store.close()


async def test_all_keys_of_a_call_share_a_slot_of_a_cluster(tmp_path: Path) -> None:
    flags = ("--cluster-enabled", "yes", "--port", "0", "--cluster-config-file", str(tmp_path / "nodes.conf"))
    with running(BINARIES["valkey"], tmp_path, *flags, "--cluster-port", "17991") as url:
        async with Redis.from_url(url) as redis:
            await redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while "cluster_state:ok" not in str(await redis.execute_command("CLUSTER", "INFO")):
                await asyncio.sleep(0.01)
        limits = (*LIMITS, Limit(Resource.TOKENS, 900, Rate(3600, 900), key="k{1}"))
        async with Redis.from_url(url) as redis, connected(url) as store:
            running_on = await store.reserve("{a}b", "k{1}", limits, Ask(1, 100, 100))
            await store.extend(running_on, 10)
            await store.heartbeat()
            await redis.flushall()
            reservation = await store.reserve("{a}b", "k{1}", limits, Ask(1, 1, 1))
            await store.settle(reservation, Usage(1, 1))
            await store.settle(running_on, Usage(100, 100))
            assert [state.remaining for state in await store.states("{a}b", "k{1}", limits)] == [798, 10, 698]


# for a user of its own

QUOTAS = (Path(__file__).parents[3] / "docs" / "quotas.md").read_text(encoding="utf-8")
(NEEDED,) = re.findall(r"^\+@connection .*$", QUOTAS, re.MULTILINE)
CALLED = re.compile(r"redis\.p?call\('(\w+)'")  # by a script
SENT = re.compile(r"""\(b"([A-Z]+)"(?:, b"([A-Z]+)")?""")  # by this process
OF_CONNECTIONS = {"ping"}  # +@connection has them


def test_the_documented_commands_are_the_sent_ones_and_the_scripts() -> None:
    store = Path(redis_client.__file__).parent
    called = {name for path in LUA.glob("*.lua") for name in CALLED.findall(path.read_text(encoding="utf-8"))}
    sources = [path.read_text(encoding="utf-8") for path in store.glob("*.py")]
    sent = {"|".join(filter(None, words)) for source in sources for words in SENT.findall(source)}
    needed = {word.lower() for word in called | sent} - OF_CONNECTIONS
    assert set(NEEDED.split()) == {"+@connection", *(f"+{word}" for word in needed)}


@pytest.fixture(params=sorted(BINARIES))
def restricted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of a server without authentication, and for a user with the documented commands and keys."""
    acl = tmp_path / "users.acl"
    acl.write_text(f"user default on nopass ~* &* +@all\nuser sluice on >secret ~sluice:* {NEEDED}\n")
    with running(BINARIES[request.param], tmp_path, "--aclfile", str(acl)) as url:
        yield url, url.replace("unix://", "unix://sluice:secret@")


async def _batches(store: RedisStore) -> None:
    batches, line = store.batches(), FinishedLine("b", 1, 0, True)
    assert await batches.put_file("a", "f", 1, 2e9, "record", 2**20) and await batches.delete_file("a", "f")
    assert await batches.open("a", "b", {"status": "validating"}, 1) and await batches.claim("a", "b") == 1
    assert await store.finish_line("a", "k", LIMITS, line, Usage(1, 1))
    assert list(await batches.done_lines("a", "b")) == [0]
    assert await batches.update("a", "b", {"status": "completed"}, epoch=1)


async def _usage(store: RedisStore) -> None:
    today = datetime.now(UTC).date()
    ((tenant, _),) = await store.ledger.ledgers(today, today)
    assert set(await usage_by_key(store, tenant, today)) == {"k", "other"}


async def _alert(store: RedisStore) -> None:
    due: asyncio.Queue[DueAlert] = asyncio.Queue()
    store.alerts.on_due = due.put_nowait
    watched = Limit(Resource.TOKENS, 10, Budget(BudgetPeriod.DAY), alerts=(Alert(10, "https://a.example"),))
    await store.settle(await store.reserve("a", "k", (*LIMITS[:1], watched), Ask(1, 1, 1)), Usage(1, 1))
    await store.alerts.ended((await due.get()).crossing, "sent")


async def test_every_script_and_the_probe_run_with_the_commands_that_are_documented(
    restricted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "PROBE_SECONDS", 0.02)
    url, own = restricted
    async with connected(own) as store, Redis.from_url(url) as redis, asyncio.timeout(240):
        ran = set[str]()

        def note(script: str, began: float, ended: float, failure: Exception | None) -> None:
            assert not isinstance(failure, StoreFault), failure
            ran.add(script)

        store.on_command.append(note)
        held = await reserved(store)
        await store.extend(held, 5)
        await store.states("a", "k", LIMITS)
        await store.settle(await store.reserve("a", "k", LIMITS, Ask(1, 1, 1, attempt=Attempt("ab", 2))), Usage(1, 1))
        assert await store.conclude("a", Delivered("cd", False, None)) is False
        store.book("a", "other", Usage(1, 2))
        assert await store.lease_kv("a", 1000, 500) == (500, store.lease)
        await store.served_sums("fleet").exchange({"a": 1.0})
        await store.announcements("fleet").announce("one", b"said")
        await store.announcements("fleet").leave("one")
        assert await store.responses().store("a", "r", None, b"said", StoredResponseLimits())
        assert await store.responses().read("a", "r") == b"said"
        assert await store.responses().delete("a", "r")
        assert await store.responses().ask_lease("a", "open", "r", 1) == "ok"
        await _batches(store)
        await _alert(store)
        await store.heartbeat()
        await _usage(store)

        await redis.hdel("sluice:{a}", f"r:{held.id}")  # one that is restored alone
        await store.heartbeat()
        await redis.delete("sluice:{a}")  # all is restored
        await store.heartbeat()

        async with hanging(url):
            with pytest.raises(StoreUnavailable):
                await reserved(store)  # perhaps it was: that is reclaimed
            charged_later = await store.reserve("a", None, LIMITS, Ask(1, 1, 1), "open")
            adopted = await store.reserve("a", None, LIMITS, Ask(1, 1, 1), "open")
            await store.settle(charged_later, Usage(1, 1))
        await until_connected(store)
        await store.reserve("a", None, LIMITS, Ask(1, 1, 1), "lease")  # for which a slice is set aside
        await store.heartbeat()

        await redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(StoreUnavailable):
            await reserved(store)
        store.returned.clear()
        await redis.config_set("min-replicas-to-write", 0)
        await store.returned.wait()  # the probe was accepted
        for reservation in (held, adopted):
            await store.settle(reservation, Usage(1, 1))
        await store.heartbeat()
        assert ran == set(Script)
        assert not [entry for entry in await redis.acl_log() if entry["username"] == "sluice"]


# behind TLS, where a server and tools for that are installed


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if server is None or openssl is None:
        pytest.skip("no redis-server or no openssl on PATH")
    folder = tmp_path_factory.mktemp("secure")
    certificate, key, acl = folder / "cert.pem", folder / "key.pem", folder / "users.acl"
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, "req", *made], check=True, capture_output=True)
    acl.write_text(f"user default off\nuser sluice on >secret ~sluice:* {NEEDED}\n")
    port = free_port()
    flags = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--save", "", "--aclfile", str(acl)]
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    log = folder / "log"
    with log.open("wb") as out, subprocess.Popen(**bound([server, *flags, *files]), stdout=out, stderr=out) as process:
        eventually(lambda: process.poll() is not None or b"Ready to accept" in log.read_bytes())
        if process.poll() is not None:
            pytest.skip("this redis-server has no TLS")
        yield f"localhost:{port}/0?ssl_ca_certs={certificate}"
        process.terminate()


def at(address: str, credentials: str) -> RedisStore:
    return RedisStore.at(f"rediss://{credentials}@{address}", timeout=5)


async def test_a_store_behind_tls_is_used_as_any_other(address: str) -> None:
    store = at(address, "sluice:secret")
    await store.connect()
    reservation = await store.reserve("acme", "k", LIMITS, Ask(1, 10, 20))
    await store.settle(reservation, Usage(10, 20))
    assert [state.remaining for state in await store.states("acme", "k", LIMITS)] == [970, 10]
    await store.close()


async def test_a_wrong_password_is_told_without_it(address: str) -> None:
    store = at(address, "sluice:not-the-secret")
    with pytest.raises(StoreUnavailable) as told:
        await store.connect()
    assert "not-the-secret" not in str(told.value)
    await store.close()


async def test_an_outage_of_the_store_and_its_return_are_logged_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_client, "PROBE_SECONDS", 0.02)
    async with connected(url) as store, Redis.from_url(url) as redis:
        quotas = Quotas(store, heartbeat=0.001)
        async with beside(quotas.run()):
            await unserving(redis, "OOM", tmp_path)
            for _ in range(20):
                with pytest.raises(StoreUnavailable):
                    await reserved(store)
            await redis.config_set("maxmemory", 0)
            await until_connected(store)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("quotas")]
    assert len(said) == 2, said
    assert re.match("each tenant's on_store_outage applies: .* does not serve: .*'maxmemory'", said[0])
    assert said[1] == "the quota store serves again"


async def test_heartbeats_end_with_their_server_also_in_the_turn_in_which_the_store_is_back(url: str) -> None:
    async with connected(url) as store:
        store.returned.clear()
        await assert_ends_when_cancelled(Quotas(store, heartbeat=3600).run(), store.returned)


async def test_six_hundred_requests_that_end_at_once_are_settled_in_ten_writes_without_a_heartbeat(url: str) -> None:
    limits = (Limit(Resource.CONCURRENT_REQUESTS, 1000),)
    async with connected(url) as store:
        held = await asyncio.gather(*(store.reserve("a", None, limits, Ask(1, 0, 0)) for _ in range(600)))
        link = store._runner.client._link
        assert link is not None
        written = list[int]()
        transport = link._transport

        def write(data: bytes) -> None:
            written.append(data.count(b"EVALSHA"))
            transport.write(data)

        link._transport = Mock(write=write)
        ended = asyncio.get_running_loop().create_future()
        left = {one.id for one in held}

        def settled(reservation: Reservation, error: BaseException | None) -> None:
            assert error is None
            left.discard(reservation.id)
            if not left:
                ended.set_result(None)

        for one in held:
            store.settle_soon(one, Usage(), partial(settled, one))
        assert sum(written) == 576, "most are at the store before this turn of the loop is over"
        await ended
        assert len(written) == 10
        (state,) = await store.states("a", None, limits)
        assert state.remaining == 1000
