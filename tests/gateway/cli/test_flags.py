from argparse import ArgumentParser
from pathlib import Path

import pytest

from gateway.cli.flags import SettingsError, add_flags, load, misspelled
from gateway.settings.settings import Settings


def parse(*arguments: str) -> Settings:
    parser = ArgumentParser()
    add_flags(parser)
    return load(parser.parse_args(arguments))


def refusal(*arguments: str) -> str:
    with pytest.raises(SettingsError) as refused:
        parse(*arguments)
    return str(refused.value)


def test_every_setting_but_the_secrets_has_a_flag() -> None:
    parser = ArgumentParser()
    add_flags(parser)
    flags = {action.dest for action in parser._actions} - {"help"}
    secrets = {"pepper", "storage_secret", "old_storage_secrets", "webhook_secret", "admin_key", "otlp_headers"}
    secrets.add("oidc_client_secret")
    assert flags == set(Settings.model_fields) - secrets


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PORT", "81")
    monkeypatch.setenv("SLUICE_SEED", "5")
    settings = parse("--port", "82")
    assert (settings.port, settings.seed) == (82, 5)


def test_the_help_shows_units_and_defaults() -> None:
    parser = ArgumentParser()
    add_flags(parser)
    shown = " ".join(parser.format_help().split())
    assert "--max-num-seqs N most sequences in one step (default: 256)" in shown
    assert "--max-body-bytes BYTES" in shown
    assert "(default: 4MiB)" in shown
    assert "--dtype auto|float32|float16|bfloat16" in shown


def test_a_flag_that_is_on_or_off_needs_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse().dev, parse("--dev").dev) == (False, True)
    monkeypatch.setenv("SLUICE_DEV", "true")
    assert parse().dev


def test_only_the_named_flags_are_added_with_what_they_mean_to_the_command() -> None:
    parser = ArgumentParser()
    add_flags(parser, only={"policy": "with the prices"})
    assert {action.dest for action in parser._actions} == {"help", "policy"}
    assert "--policy PATH with the prices (default: auto)" in " ".join(parser.format_help().split())


def test_a_bad_value_is_one_line_that_names_the_flag_the_variable_and_the_value() -> None:
    assert refusal("--max-num-seqs", "0") == "--max-num-seqs (SLUICE_MAX_NUM_SEQS): must be at least 1; got '0'"
    assert refusal("--prefill-chunk", "some") == (
        "--prefill-chunk (SLUICE_PREFILL_CHUNK): must be a whole number or 'off'; got 'some'"
    )


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--kv-memory-fraction", "2", "below 1"),
        ("--kv-memory-fraction", "nan", "below 1"),
        ("--header-timeout", "0", "above 0"),
        ("--header-timeout", "soon", "a number"),
        ("--port", "99999", "at most 65535"),
        ("--seed", "1.5", "a whole number"),
        ("--max-body-bytes", "0", "at least 1KiB"),
        ("--kv-memory-bytes", "many", "a size such as 512MiB"),
        ("--kv-memory-bytes", "5 apples", "a size such as 512MiB"),
        ("--served-model-name", "", "at least 1 character long"),
        ("--served-model-name", "x" * 300, "at most 256 characters long"),
        ("--log-level", "loud", "'auto', 'debug', 'info', 'warning' or 'error'"),
        ("--advertise", "foo", "http:// or https:// with a host, and nothing behind its port"),
        ("--cors-origins", "foo", "off, * or origins such as https://a.example, separated by commas"),
    ],
)
def test_a_bad_value_is_told_in_our_own_words(flag: str, value: str, rule: str) -> None:
    assert f": must be {rule}; got " in refusal(flag, value)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([""], "--model (SLUICE_MODEL): must be a model, or a name of at most 256 characters and a model"),
        (["a="], "--model (SLUICE_MODEL): must be a model, or a name of at most 256 characters and a model"),
        (["a=x/y", "a=x/z"], "--model: two models have the same name in the API"),
        (["x/y", "hf:x/y"], "--model: two models have the same name in the API"),
        (["x/y", "x/z", "--prefill-chunk=off"], "--prefill-chunk off is for one --model, and 2 are given"),
        (["a=x/y", "b=x/z", "--adapter=b=dir"], "--adapter b: the name is that of a model, or of another adapter"),
        (["a=x/y", "b=x/z", "--adapter=c=b="], "--adapter c=b=: name the adapter's directory behind its model"),
        (["a=x/y", "b=x/z", "--adapter=c=d=e"], "--adapter c=d=e: 'd' is no model of this server, which has 'a', 'b'"),
    ],
)
def test_models_have_names_of_their_own(given: list[str], complaint: str) -> None:
    flags = [one if one.startswith("--") else f"--model={one}" for one in given]
    assert refusal(*flags).startswith(complaint)


def test_a_model_goes_by_the_name_before_it_or_by_its_own(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    settings = parse("--model", "small=smollm2", "--model", f"{tmp_path}/a=b", "--model", "hf:x/y")
    assert settings.models == {"small": "smollm2", "a=b": f"{tmp_path}/a=b", "x/y": "hf:x/y"}
    assert settings.served_name == "small"
    assert parse("--model=x/y", "--served-model-name=z").models == {"z": "x/y"}


def test_an_adapter_is_of_the_model_that_it_names_or_of_the_first() -> None:
    models = "--model=a=x/y", "--model=b=x/z"
    settings = parse(*models, "--adapter=one=dir", "--adapter=two=b=dir", "--adapter=three=./c=dir")
    assert settings.named_adapters == {
        "one": ("a", Path("dir")),
        "two": ("b", Path("dir")),
        "three": ("a", Path("c=dir")),
    }


def test_each_pattern_of_a_setting_has_words() -> None:
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        assert any(getattr(limit, "pattern", None) for limit in field.metadata) == bool(extra["form"]), name


def test_every_bad_value_gets_its_line() -> None:
    lines = refusal("--port", "99999", "--dtype", "f32").splitlines()
    assert [line.split()[0] for line in lines] == ["--dtype", "--port"]


def test_a_refused_secret_is_not_repeated() -> None:
    assert "hunter2" not in refusal("--demo-key", "hunter2 hunter2")


def test_a_misspelled_variable_is_named_with_the_nearest_setting() -> None:
    environ = {"SLUICE_MAX_NUM_SEQ": "1", "SLUICE_ZZZ": "2", "SLUICE_PORT": "3", "SLUICE_CACHE_DIR": "/x", "HOME": "/"}
    assert misspelled(environ) == [
        "SLUICE_MAX_NUM_SEQ is not a setting and is ignored (did you mean SLUICE_MAX_NUM_SEQS?)",
        "SLUICE_ZZZ is not a setting and is ignored",
    ]
