"""A store behind TLS and a user of its own, where a server and tools for that are installed."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from benchmarks.processes import free_port
from quotas.errors import StoreUnavailable
from quotas.policy.limit import Limit, Rate, Resource
from quotas.reservation import Ask, Usage
from quotas.store.redis_store import RedisStore
from tests.gateway.server_process import eventually

NEEDED = (
    "+@connection +info +script|load +evalsha +time +hget +hset +hdel +hmget +hgetall +exists +del +expire +pexpire "
    "+pttl +scan"
)  # as docs/quotas.md says
LIMITS = (Limit(Resource.TOKENS, 1000, Rate(60, 1000)), Limit(Resource.CONCURRENT_REQUESTS, 5))


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
    with log.open("wb") as out, subprocess.Popen([server, *flags, *files], stdout=out, stderr=out) as process:
        eventually(lambda: process.poll() is not None or b"Ready to accept" in log.read_bytes())
        if process.poll() is not None:
            pytest.skip("this redis-server has no TLS")
        yield f"localhost:{port}/0?ssl_ca_certs={certificate}"
        process.terminate()


def at(address: str, credentials: str) -> RedisStore:
    return RedisStore.at(f"rediss://{credentials}@{address}", timeout=5)


async def test_everything_works_with_the_commands_that_are_documented(address: str) -> None:
    store = at(address, "sluice:secret")
    await store.connect()
    reservation = await store.reserve("acme", "k", LIMITS, Ask(1, 10, 20))
    await store.extend(reservation, 5)
    await store.settle(reservation, Usage(10, 20))
    store.book("acme", "other", Usage(1, 2))
    await store.heartbeat()
    assert [state.remaining for state in await store.states("acme", "k", LIMITS)] == [970, 5]
    assert await store.lease_kv("acme", 1000, 500) == (500, store.lease)
    ((tenant, day),) = await store.ledgers()
    assert tenant == "acme" and set(await store.usage(tenant, day)) == {"k", "other"}
    await store.close()


async def test_a_wrong_password_is_told_without_it(address: str) -> None:
    store = at(address, "sluice:not-the-secret")
    with pytest.raises(StoreUnavailable) as told:
        await store.connect()
    assert "not-the-secret" not in str(told.value)
    await store.close()
