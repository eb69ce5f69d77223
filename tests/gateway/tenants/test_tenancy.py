"""What an admin changes while the model loads holds when the gateway serves."""

import asyncio
from pathlib import Path

from gateway.settings.settings import Settings
from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from gateway.tenants.tenancy import Tenancy, open_tenancy

PATIENCE = 240.0  # seconds
ELSEWHERE = "redis://127.0.0.1:1"  # a store that nobody asks anything


async def watched_until(tenancy: Tenancy, happened: asyncio.Event) -> None:
    watching = asyncio.create_task(tenancy.watch())
    async with asyncio.timeout(PATIENCE):
        await happened.wait()
    watching.cancel()
    await asyncio.wait([watching])


async def test_a_key_that_is_revoked_before_the_files_are_watched_opens_no_more(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key, record = new_key("acme", store.pepper())
    store.add(record)
    revoked = asyncio.Event()

    async def tell(_: object) -> None:
        revoked.set()

    with open_tenancy(Settings(state_dir=tmp_path, redis_url=ELSEWHERE)) as tenancy:
        assert tenancy.keys.ring.authenticate(f"Bearer {key}".encode()).tenant == "acme"
        store.remove(record.id)
        tenancy.keys.on_change.append(tell)
        await watched_until(tenancy, revoked)
        assert not tenancy.keys.ring.of_tenant("acme")


async def test_a_policy_that_is_edited_before_the_files_are_watched_takes_effect(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tenants:\n  acme:\n    weight: 2\n")
    edited = asyncio.Event()

    async def tell(_: object) -> None:
        edited.set()

    with open_tenancy(Settings(state_dir=tmp_path, redis_url=ELSEWHERE, policy=policy)) as tenancy:
        policy.write_text("tenants:\n  acme:\n    weight: 30\n")
        tenancy.policies.on_change.append(tell)
        await watched_until(tenancy, edited)
        assert tenancy.policies.current.tenant("acme").weight == 30
