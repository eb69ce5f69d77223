"""What is said of a machine and a configuration, good and bad."""

import resource
import ssl
import subprocess
from errno import EACCES
from pathlib import Path

import pytest

from backend.errors import ConfigError
from backend.model.hub import resolve_config
from backend.model.model_config import read_model_config
from gateway.doctor import file_checks, machine_checks, model_checks, network_checks, store_checks
from gateway.doctor.check import Verdict, ok
from gateway.http.connection import bound_socket
from gateway.settings.settings import Settings
from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore
from quotas.errors import StoreUnavailable

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
GIB = 2**30


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    return _certificate(directory, 365)


def _certificate(directory: Path, days: int) -> tuple[Path, Path]:
    cert, key = directory / f"cert{days}.pem", directory / f"key{days}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-days", str(days), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


# the machine


def test_the_clock() -> None:
    assert machine_checks.clock(1_900_000_000.0, synchronised=True).verdict is OK
    loose = machine_checks.clock(1_900_000_000.0, synchronised=False)
    assert (loose.verdict, "NTP" in loose.remedy) == (WARNING, True)
    assert machine_checks.clock(0.0, synchronised=True).verdict is PROBLEM
    assert "UTC" in machine_checks.clock().found


def test_kernels_that_are_compiled_and_those_that_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    missing = machine_checks.kernels("fpu avx2 fma")
    assert missing.verdict is WARNING
    assert "(avx2 fma)" in missing.found
    assert "python -m backend.kernels.build" in missing.remedy or "g++" in missing.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("threads", "verdict"), [(1, OK), (3, OK), (4, WARNING), (5, WARNING)])
def test_threads_against_cores(threads: int, verdict: Verdict) -> None:
    check = model_checks.threads(Settings(threads=threads), cores=4)
    assert check.verdict is verdict
    assert verdict is OK or "--threads to 3" in check.remedy


def test_a_single_core_is_shared() -> None:
    assert model_checks.threads(Settings(threads=1), cores=1).verdict is OK


def test_the_gpu_that_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(machine_checks, "NVIDIA", tmp_path / "version")
    assert machine_checks.gpu("auto").verdict is OK
    assert "there is no NVIDIA driver" in machine_checks.gpu("cuda").found
    (tmp_path / "version").write_text("NVRM version: 999\n")
    assert machine_checks.gpu("auto").verdict is WARNING
    assert "the driver is there" in machine_checks.gpu("cuda").found
    assert machine_checks.gpu("cpu").verdict is OK


# the model


def test_the_embedded_model_is_there_and_fits() -> None:
    files, memory = model_checks.model(Settings(device="cpu", kv_memory_bytes="16MiB"))
    assert (files.verdict, memory.verdict) == (OK, OK)
    assert "KV 16" in memory.found or "KV 15" in memory.found


def test_a_model_that_is_not_there() -> None:
    (check,) = model_checks.model(Settings(model="/nowhere"))
    assert check.verdict is PROBLEM
    assert "/nowhere" in check.found


def test_wishes_that_the_memory_does_not_grant() -> None:
    *_, memory = model_checks.model(Settings(device="cpu", kv_memory_bytes="1000TiB"))
    assert memory.verdict is PROBLEM
    assert "kv_memory_bytes" in memory.found


def test_weights_that_do_not_fit() -> None:
    config = read_model_config(resolve_config("embedded"))
    with pytest.raises(ConfigError, match="the weights take"):
        model_checks.plan_memory(Settings(device="cpu"), config, free=2**20)
    plan = model_checks.plan_memory(Settings(device="cpu"), config, free=4 * GIB)
    assert plan.kv + plan.weights < plan.free


def test_little_memory_left_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "free_memory", lambda: 100 * 2**20)
    *_, memory = model_checks.model(Settings(device="cpu", kv_memory_bytes="85MiB"))
    assert memory.verdict is WARNING


# files


@pytest.mark.parametrize(
    ("limits", "said"),
    [((1024, 99_999), "99,999 may be open, 352 are"), ((99_999, 99_999), "99,999"), ((-1, -1), "any number")],
)
def test_open_files(limits: tuple[int, int], said: str) -> None:
    check = file_checks.open_files(Settings(max_connections=256), limits)
    assert (check.verdict, check.found.startswith(said)) == (OK, True)
    assert ("1,024 until" in check.found) == (limits[0] < limits[1])


def test_keys_of_tenants_that_the_policy_does_not_name(tmp_path: Path) -> None:
    policy, store = tmp_path / "policy.yaml", KeyStore(tmp_path / "state")
    store.add(new_key("acme", store.pepper())[1])
    settings = Settings(policy=policy, state_dir=store.directory)
    policy.write_text("tenants: {acme: }")
    assert file_checks.keys(settings) == ok("keys", "1 are stored")
    policy.write_text("tenants: {acne: }")
    check = file_checks.keys(settings)
    assert (check.verdict, 'did you mean "acne"?' in check.found) == (WARNING, True)
    assert file_checks.keys(Settings(state_dir=store.directory)).verdict is OK, "the built-in policy names nobody"
    policy.write_text("tenants: [")
    assert file_checks.keys(settings).verdict is OK, "the check of the policy says it"


def test_few_open_files_are_a_warning_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    check = file_checks.open_files(Settings())
    assert check.verdict is WARNING
    assert check.found.endswith("for 416 connections")
    assert "raise its limit to 4192" in check.remedy


def test_a_state_directory_that_is_made_when_needed(tmp_path: Path) -> None:
    check = file_checks.state_dir(Settings(state_dir=tmp_path / "a" / "b"))
    assert (check.verdict, list(tmp_path.iterdir())) == (OK, [])


def test_a_state_directory_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", closed)
    check = file_checks.state_dir(Settings(state_dir=tmp_path))
    assert (check.verdict, check.found) == (PROBLEM, f"{tmp_path}: Permission denied")


def test_a_state_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    check = file_checks.state_dir(Settings(state_dir=tmp_path / "state"))
    assert (check.verdict, check.found) == (PROBLEM, f"{tmp_path / 'state'} is no directory")


def test_a_state_directory_that_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    check = file_checks.state_dir(Settings(state_dir=tmp_path))
    assert (check.verdict, check.remedy) == (PROBLEM, f"chmod 700 {tmp_path}")


@pytest.mark.parametrize("name", ["pepper", "admin-key"])
def test_secrets_that_others_may_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x" * 32)
    (tmp_path / name).chmod(0o644)
    tmp_path.chmod(0o700)
    check = file_checks.state_dir(Settings(state_dir=tmp_path))
    assert (check.verdict, check.remedy) == (PROBLEM, f"chmod 600 {tmp_path / name}")


def test_a_damaged_key_file(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")
    (tmp_path / "keys.json").chmod(0o600)
    tmp_path.chmod(0o700)
    assert "damaged" in file_checks.state_dir(Settings(state_dir=tmp_path)).found


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert file_checks.state_dir(Settings(state_dir=tmp_path)).verdict is OK
    monkeypatch.setattr(file_checks, "LEAST_SPACE", 2**63)
    assert file_checks.state_dir(Settings(state_dir=tmp_path)).verdict is WARNING


def test_policies(tmp_path: Path) -> None:
    assert "limits nobody" in file_checks.policy(Settings()).found
    path = tmp_path / "policy.yaml"
    path.write_text("tenants: {acme: {weight: 2}}")
    assert "1 tenants" in file_checks.policy(Settings(policy=path)).found
    path.write_text("tenants: {acme: {wieght: 2, modles: []}}")
    check = file_checks.policy(Settings(policy=path))
    assert check.verdict is PROBLEM
    assert "wieght" in check.found and "and 1 more" in check.found
    assert "sluice policy check" in check.remedy


def test_tls_that_works(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    check = file_checks.tls(Settings(tls_cert_file=cert, tls_key_file=key))
    assert check.verdict is OK
    assert check.found.endswith(("in 364 days", "in 365 days"))


def test_tls_that_ends_soon(tmp_path: Path) -> None:
    cert, key = _certificate(tmp_path, 5)
    assert file_checks.tls(Settings(tls_cert_file=cert, tls_key_file=key)).verdict is WARNING


def test_tls_whose_key_is_another(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    _, key = _certificate(tmp_path, 5)
    check = file_checks.tls(Settings(tls_cert_file=certificate[0], tls_key_file=key))
    assert check.verdict is PROBLEM


def test_tls_that_has_ended(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(cert: Path, key: Path) -> None:
        raise ssl.SSLCertVerificationError("certificate has expired")

    monkeypatch.setattr(file_checks, "_handshake", ended)
    cert, key = certificate
    assert "has expired" in file_checks.tls(Settings(tls_cert_file=cert, tls_key_file=key)).found


def test_no_tls_matters_where_others_reach_the_gateway() -> None:
    assert file_checks.tls(Settings()).verdict is OK
    assert file_checks.tls(Settings(host="0.0.0.0")).verdict is WARNING


# the network


def test_ports_free_and_taken() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        tenants, admin = network_checks.ports(Settings(port=port, admin_port=0))
        assert (tenants.verdict, admin.verdict) == (PROBLEM, OK)
        assert "--port" in tenants.found
        _, admin = network_checks.ports(Settings(port=0, admin_port=port))
        assert "--admin-port" in admin.found
    assert network_checks.ports(Settings(port=0, admin_port="off"))[1].verdict is OK


def test_collectors() -> None:
    assert network_checks.collector(Settings()).verdict is OK
    with bound_socket("127.0.0.1", 0) as listening:
        listening.setblocking(True)
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert network_checks.collector(Settings(otlp_endpoint=url)).verdict is OK
    assert network_checks.collector(Settings(otlp_endpoint=url)).verdict is WARNING


# the store


def test_the_embedded_store() -> None:
    (check,) = store_checks.store(Settings())
    assert check.verdict is OK


def test_a_store_that_is_not_there_is_named_without_its_password() -> None:
    (check,) = store_checks.store(Settings(redis_url="redis://user:hidden@127.0.0.1:1/0"))
    assert check.verdict is PROBLEM
    assert "127.0.0.1:1" in check.found and "hidden" not in str(check)


def test_a_store_that_keeps_nothing(redis_url: str) -> None:
    there, *rest = store_checks.store(Settings(redis_url=redis_url))
    assert there.verdict is OK
    assert [check.remedy for check in rest] == ["set appendonly yes, with appendfsync everysec"]


def test_what_is_said_of_a_store_that_may_be_used() -> None:
    kept = {"redis_version": "7.2", "aof_enabled": 1}
    assert [check.verdict for check in store_checks.judge("here", kept, 0.001, 0.1)] == [OK]
    far, ahead = store_checks.judge("here", kept, 0.02, 2.5)[1:]
    assert "20.0 ms" in far.found and "2.5 s ahead" in ahead.found
    (full,) = store_checks.judge("here", kept | {"used_memory": 90 * 2**20, "maxmemory": 100 * 2**20}, 0.001, 0.0)[1:]
    assert "90 of at most 100 MiB" in full.found


def test_a_store_that_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(url: str) -> None:
        raise StoreUnavailable("its maxmemory-policy is allkeys-lru")

    monkeypatch.setattr(store_checks, "_connect", refused)
    (check,) = store_checks.store(Settings(redis_url="redis://here"))
    assert check.verdict is PROBLEM
    assert "allkeys-lru" in check.found


@pytest.mark.parametrize(
    ("url", "place"),
    [("redis://:p@h/0", "h:6379"), ("rediss://u:p@h:7/0", "h:7"), ("unix:///run/redis.sock?db=1", "/run/redis.sock")],
)
def test_where_a_store_is(url: str, place: str) -> None:
    assert store_checks.address(url) == place
