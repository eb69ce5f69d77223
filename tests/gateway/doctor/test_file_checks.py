import resource
import ssl
import subprocess
from errno import EACCES
from pathlib import Path

import pytest

from gateway.doctor import file_checks
from gateway.doctor.check import Verdict, ok
from gateway.settings.settings import Settings
from gateway.tenants.auth import new_key
from gateway.tenants.key_store import KeyStore

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM


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
    assert file_checks.keys(settings) == ok("keys", "1 stored")
    policy.write_text("tenants: {acne: }")
    check = file_checks.keys(settings)
    assert (check.verdict, 'did you mean "acne"?' in check.found) == (WARNING, True)
    assert file_checks.keys(Settings(state_dir=store.directory)).verdict is OK, "the built-in policy names nobody"
    policy.write_text("tenants: [")
    assert file_checks.keys(settings).verdict is OK, "the check of the policy says it"


def test_models_of_the_policy_that_are_not_served(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "defaults:\n  price: {input: 1/1k, output: 2/1k, currency: USD,\n"
        "    models: {embeded: {input: 3/1k, output: 4/1k}}}\n"
        "aliases: {chat: [embedded, lawer]}\ntenants: {acme: {models: [chat, embedded]}}\n"
    )
    check = file_checks.policy(Settings(policy=policy, model=["embedded"]))
    assert check.verdict is WARNING
    assert check.found.endswith('models that are not served: embeded; did you mean "embedded"?; lawer')
    served = Settings(policy=policy, model=["embedded", "embeded=embedded", "lawer=embedded"])
    assert file_checks.policy(served).verdict is OK
    assert file_checks.policy(Settings(policy=policy, adapter_dir=tmp_path)).verdict is OK, "they may be loaded later"


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
    monkeypatch.setattr(file_checks, "MIN_FREE_BYTES", 2**63)
    assert file_checks.state_dir(Settings(state_dir=tmp_path)).verdict is WARNING


def test_policies(tmp_path: Path) -> None:
    assert "limits no tenant" in file_checks.policy(Settings()).found
    path = tmp_path / "policy.yaml"
    path.write_text("tenants: {acme: {weight: 2}}")
    assert ", 1 tenant, version" in file_checks.policy(Settings(policy=path)).found
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
