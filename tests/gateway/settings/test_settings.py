import re
import resource
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.cli.flags import SettingsError, add_flags, load
from gateway.settings.field import ENV_PREFIX, GROUPS
from gateway.settings.setting_fields import default_state_dir
from gateway.settings.settings import Settings, format_bytes


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)


def test_the_defaults_agree_with_each_other() -> None:
    settings = Settings()
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, ("embedded",))
    assert settings.threads >= 1


def test_every_setting_has_a_group_a_unit_and_a_description() -> None:
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        assert extra["group"] in GROUPS, name
        assert "unit" in extra, name
        assert field.description, name


def test_a_variable_wins_over_the_default_and_an_argument_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_NUM_SEQS", "7")
    assert Settings().max_num_seqs == 7
    assert Settings(max_num_seqs=9).max_num_seqs == 9


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_DEMO_KEY", "")
    monkeypatch.setenv("SLUICE_PORT", "")
    assert Settings().demo_key is None
    assert Settings().port == 8000


@pytest.mark.parametrize(
    ("written", "count"), [("512MiB", 512 * 2**20), ("2GiB", 2**31), ("1.5 GB", 1_500_000_000), ("1048576", 2**20)]
)
def test_bytes_are_written_in_human_units(monkeypatch: pytest.MonkeyPatch, written: str, count: int) -> None:
    monkeypatch.setenv("SLUICE_KV_MEMORY_BYTES", written)
    assert Settings().kv_memory_bytes == count


def test_auto_is_the_same_as_saying_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Settings()
    names = ("max_model_len", "kv_memory_bytes", "kv_memory_fraction", "prefill_chunk", "served_model_name", "demo_key")
    for name in names:
        monkeypatch.setenv(ENV_PREFIX + name.upper(), "auto")
    assert Settings() == plain


def test_an_open_budget_contradicts_nothing() -> None:
    settings = Settings(max_num_seqs=60_000, prefill_chunk=9_000)
    assert settings.max_num_batched_tokens is None
    assert Settings(prefill_chunk="off", max_model_len=9_000).prefill_chunk == "off"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_memory_bytes": 2**30, "kv_memory_fraction": 0.5}, "--kv-memory-bytes 1GiB and --kv-memory-fraction 0.5"),
        (
            {"max_num_seqs": 600, "max_num_batched_tokens": 512},
            "--max-num-batched-tokens 512 is below --max-num-seqs 600",
        ),
        (
            {"prefill_chunk": 1024, "max_num_batched_tokens": 512},
            "--prefill-chunk 1024 is above --max-num-batched-tokens 512",
        ),
        (
            {"prefill_chunk": "off", "max_model_len": 4096, "max_num_batched_tokens": 512},
            "raise that to 4096 or lower the length",
        ),
        ({"max_model_len": 100, "default_max_tokens": 100}, "at most 99"),
        ({"tls_cert_file": "/nowhere.pem"}, "--tls-cert-file without --tls-key-file"),
        ({"tls_cert_file": "/a.pem", "tls_key_file": "/b.pem"}, "/b.pem: no such file, or not readable"),
    ],
)
def test_a_contradiction_is_refused_with_the_arithmetic(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**given)
    assert said in str(refused.value)


def test_more_connections_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(ValidationError, match="needs 1000 \\+ 96 = 1096 open files, and this process may open 1024"):
        Settings(max_connections=1000)
    assert Settings(max_connections=928).max_connections == 928


@pytest.mark.parametrize(
    ("limit", "connections"), [(2**20, 4096), (-1, 4096), (4192, 4096), (4191, 4095), (1024, 928), (112, 16)]
)
def test_there_are_as_many_connections_as_open_files_allow(
    monkeypatch: pytest.MonkeyPatch, limit: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, limit))
    assert Settings().max_connections == connections
    assert Settings().has_few_files == (connections < 4096)
    assert not Settings(max_connections=connections).has_few_files


def test_advice_about_open_files_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 64, 111):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        with pytest.raises(ValidationError, match=r"needs 16 \+ 96 = 112 .* may open") as refused:
            Settings()
        assert "lower it" not in str(refused.value)
        assert "raise that limit to 4192" in str(refused.value)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    with pytest.raises(ValidationError, match="lower it to 104, or raise that limit to 5096"):
        Settings(max_connections=5000)


def test_a_certificate_and_its_key_are_taken(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("PEM")
    settings = Settings(tls_cert_file=tmp_path / "cert.pem", tls_key_file=tmp_path / "key.pem")
    assert settings.tls_cert_file == tmp_path / "cert.pem"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("max_num_seqs", 0),
        ("header_timeout", "inf"),
        ("prefill_chunk", 0),
        ("dtype", "int4"),
        ("demo_key", "short"),
        ("demo_key", "with a space in it"),
        ("demo_key", "schlüssel-der-demo"),
        ("pepper", "salt"),
        ("no_such_setting", 1),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses_are_told_from_others(host: str, loopback: bool) -> None:
    assert Settings(host=host).is_loopback is loopback


def test_clients_call_a_model_in_a_directory_by_the_directorys_name(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    assert Settings(model=str(tmp_path / "small" / ".." / "small")).served_name == "small"
    assert Settings(model="Qwen/Qwen3-0.6B").served_name == "Qwen/Qwen3-0.6B"
    assert Settings(model="embedded", served_model_name="mine").served_name == "mine"
    assert Settings(model="/models/Small-135M.Q4_1.gguf").served_name == "Small-135M.Q4_1"
    assert Settings(model="hf:Qwen/Qwen3-0.6B").served_name == "Qwen/Qwen3-0.6B"
    assert Settings(model="smollm2").served_name == "smollm2"


@pytest.mark.parametrize(
    ("name", "url"),
    [
        *(("redis_url", f"redis://:SECRETPW{mark}abc@127.0.0.1:6379/0") for mark in "/#?"),
        ("redis_url", "redis://h:99999"),
        ("redis_url", "redis://[::1"),
        ("otlp_endpoint", "http://h:99999"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(name: str, url: str) -> None:
    with pytest.raises(ValidationError, match="port up to 65535") as refused:
        Settings(**{name: url})
    assert "SECRETPW" not in str(refused.value)


def test_an_address_may_have_a_password_that_is_encoded() -> None:
    for url in ("redis://:a%2Fb%23@h:6379/0", "rediss://user:pw@h", "unix:///tmp/store.sock", "redis://h"):
        assert Settings(redis_url=url).redis_url is not None


def test_secrets_stay_out_of_representations_and_errors() -> None:
    settings = Settings(demo_key="demo-key-0123456789", pepper="pepper-of-the-fish-market-in-1887")
    assert "0123456789" not in repr(settings)
    assert "fish-market" not in repr(settings)
    with pytest.raises(ValidationError) as refused:
        Settings(demo_key="a secret with spaces")
    assert "a secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["pepper", "admin_key", "demo_key"])
def test_a_templates_placeholder_for_a_secret_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="placeholder that was never replaced; `openssl rand -hex 32`"):
        Settings(**{name: "REPLACE_WITH_64_HEXADECIMAL_DIGITS"})


@pytest.mark.parametrize("name", ["pepper", "admin_key"])
@pytest.mark.parametrize("secret", ["p" * 40, "0123456789abcdef" * 4, "abcdefghijklmnopqrstuvwxyz0123456789"])
def test_a_secret_that_would_be_guessed_is_refused_without_repeating_it(name: str, secret: str) -> None:
    with pytest.raises(ValidationError, match="openssl rand -hex 32") as refused:
        Settings(**{name: secret})
    assert secret not in str(refused.value)


def test_the_state_directory_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "sluice"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings().state_dir == tmp_path / ".local" / "state" / "sluice"


def test_a_user_without_a_home_is_told_which_settings_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 3)  # a user that the machine does not know
    add_flags(ArgumentParser())  # the help shows the default
    with pytest.raises(SettingsError) as refused:
        load(Namespace(model="~a-user-who-is-not-here/model"))
    assert [line.split(" ")[0] for line in str(refused.value).splitlines()] == ["--model", "--state-dir"]
    assert load(Namespace(state_dir="/srv/sluice")).state_dir == Path("/srv/sluice")


def test_a_state_directory_of_an_environment_file_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLUICE_STATE_DIR", "~/state")
    assert Settings().state_dir == tmp_path / "state"


def test_bytes_are_shown_in_binary_units() -> None:
    assert [format_bytes(count) for count in (100, 4 * 2**20, 3 * 2**29)] == ["100B", "4MiB", "1.5GiB"]


def test_the_collector_may_be_named_by_opentelemetrys_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    settings = Settings()
    assert (settings.otlp_endpoint, settings.otlp_protocol) == ("http://collector:4318", "http")
    monkeypatch.setenv("SLUICE_OTLP_ENDPOINT", "http://other:4317")
    monkeypatch.setenv("SLUICE_OTLP_PROTOCOL", "grpc")
    settings = Settings()
    assert (settings.otlp_endpoint, settings.otlp_protocol) == ("http://other:4317", "grpc")


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:p@h/db",
        "postgresql://u:S3CRET@h:99999/db",
        "postgresql://u:S3CRET@h:1:2/db",
        "postgresql://u:S3CRET#@h/db",
        "postgresql://u:50%offS3CRET@h/db",
        "postgresql://u:S3CRET%00x@h/db",
        "postgresql://u:S3C RET@h/db",
        "postgresql://u:S3CRET@[h/db",
        "postgresql://u:S3CRET@h/db?S3CRET=1",
    ],
)
def test_a_url_of_postgres_that_its_client_cannot_read_is_refused_without_its_password(url: str) -> None:
    pytest.importorskip("psycopg", reason="no psycopg here: the extra postgres")
    with pytest.raises(ValidationError, match="must be postgresql://") as refused:
        Settings(request_log_url=url)
    assert not {"S3CRET", "S3C"} & set(re.findall(r"\w+", str(refused.value)))


def test_a_url_of_postgres_may_have_a_coded_password_and_parameters() -> None:
    pytest.importorskip("psycopg", reason="no psycopg here: the extra postgres")
    url = "postgresql://u:p%40%2F@h/db?sslmode=require"
    assert Settings(request_log_url=url).request_log_url is not None
