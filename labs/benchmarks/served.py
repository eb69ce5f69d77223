"""`sluice serve` as a benchmark starts it: the embedded model, on a core of its own, with a key for each tenant."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.settings.settings import Settings
from gateway.tenants.auth import new_key, pepper_of
from gateway.tenants.key_store import KeyStore
from labs.benchmarks.fresh import check_nothing_was_cached
from labs.benchmarks.gateway_process import GatewayProcess, gateway_process


@dataclass(frozen=True, slots=True)
class Served(GatewayProcess):
    """A gateway that knows its tenants."""

    keys: Mapping[str, str]  # by tenant


@contextmanager
def served(core: int, tenants: Iterable[str], state_dir: Path, **settings: object) -> Iterator[Served]:
    """Run it on one core with one thread; `settings` by their names. Otherwise as `gateway_process`."""
    keys = make_keys(state_dir, tenants)
    with gateway_process(state_dir, core, threads=1, **settings) as process:
        yield Served(process.port, process.pid, keys)


@contextmanager
def served_afresh(core: int, tenants: Iterable[str], state_dir: Path, **settings: object) -> Iterator[Served]:
    """Serve as `served` does. Raises `Cached` at the end if the gateway has found any token of a prompt in its
    cache.
    """
    with served(core, tenants, state_dir, metrics_on_tenant_port=True, **settings) as server:
        yield server
        check_nothing_was_cached(server.port)


def make_keys(state_dir: Path, tenants: Iterable[str]) -> dict[str, str]:
    """Make a key for each tenant, and keep their hashes where gateways with this state directory look."""
    store = KeyStore(state_dir)
    pepper = pepper_of(Settings(state_dir=state_dir), store)
    keys = {}
    for tenant in tenants:
        keys[tenant], record = new_key(tenant, pepper)
        store.add(record)
    return keys
