"""Two gateways on one store learn what tenants are served by the other."""

import json
import signal
from pathlib import Path

from tests.gateway.server_process import BODY, ServerProcess, eventually, running_server
from tests.gateway.stoppable_store import StoppableStore

STALENESS, REPLICAS = "sluice_debts_staleness_seconds", "sluice_debts_replicas"


def elsewhere(server: ServerProcess) -> float:
    return server.metric("sluice_debts_elsewhere_seconds_total")


def serve(server: ServerProcess) -> None:
    assert server.post("/v1/chat/completions", **BODY | {"max_tokens": 20}).status_code == 200


def debts(log: Path) -> list[dict[str, float]]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [entry[2] for entry in entries if entry[0] == "debts"]


def test_a_replica_has_tenants_pay_for_what_another_serves_them(store: StoppableStore, tmp_path: Path) -> None:
    flags, log = ("--threads=1", f"--redis-url=unix://{store.path}"), tmp_path / "events"
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with running_server(one, *flags) as serving, running_server(two, *flags, f"--event-log={log}") as other:
        eventually(lambda: serving.metric(REPLICAS) == other.metric(REPLICAS) == 2.0)

        def is_learned() -> bool:
            serve(serving)
            return elsewhere(other) > 0.0

        eventually(is_learned)
        assert elsewhere(serving) == 0.0, "what it served itself it does not count twice"
        told = elsewhere(other)
        assert told <= serving.metric("sluice_tenant_service_seconds_total")

        store.signal(signal.SIGSTOP)
        eventually(lambda: other.metric(STALENESS) > 1.0)
        serve(other)  # no request waits for what is not known
        store.signal(signal.SIGCONT)
        eventually(lambda: other.metric(STALENESS) < 1.0)
        serve(serving)
        eventually(lambda: elsewhere(other) > told)
    served = debts(log)
    assert served
    assert all(set(one) == {"demo"} for one in served)
