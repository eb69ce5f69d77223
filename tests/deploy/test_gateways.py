"""Settings, ports, probes and patience: what the files say agrees with the program, and with one another."""

import re
from collections.abc import Callable

import pytest
import yaml

from gateway.cli.flags import CACHE_DIR, misspelled
from gateway.http.server import END_SECONDS
from gateway.settings.settings import Settings
from quotas.policy.policy_file import parse_policy
from tests.deploy.documented import DEPLOY, ROOT
from tests.deploy.gateways import FILE_SECRETS, Gateway, composed, deployed, image, load, managed, picking, resources

GATEWAYS = pytest.mark.parametrize("gateway", [composed, deployed, picking, managed], ids=lambda make: make.__name__)
MARGIN = 10.0  # seconds to send what spans and metrics are left, and to close the store
OWN_FLAGS = {"--live", "--key-file", "--json"}  # of `sluice doctor`


@GATEWAYS
def test_the_settings_are_valid(gateway: Callable[[], Gateway]) -> None:
    settings = gateway().settings()
    assert settings.state_dir.is_absolute()
    assert settings.policy is not None


@GATEWAYS
def test_every_variable_is_a_setting(gateway: Callable[[], Gateway]) -> None:
    assert misspelled(gateway().environment) == []


def test_every_variable_anywhere_in_deploy_is_a_setting() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.name != "entrypoint.sh"]
    named = {name for text in texts for name in re.findall(r"\bSLUICE_[A-Z][A-Z_]*[A-Z]\b", text)} - {CACHE_DIR}
    plain = {match[1] if (match := FILE_SECRETS.fullmatch(name)) else name for name in named}
    settings = {f"SLUICE_{name.upper()}" for name in Settings.model_fields}
    assert plain - settings == set()


@pytest.mark.parametrize("folder", ["deploy", "gateway/doctor"])
def test_every_flag_that_is_recommended_exists(folder: str) -> None:
    flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | OWN_FLAGS
    paths = [
        path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".json"} or path.name == "rules.yaml"
    ]
    named = {flag for path in paths for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!-)", path.read_text())}
    assert named
    assert named - flags == set()


@GATEWAYS
def test_a_drain_has_its_time_before_the_process_is_killed(gateway: Callable[[], Gateway]) -> None:
    described = gateway()
    settings = described.settings()
    needed = settings.drain_delay + settings.drain_timeout + END_SECONDS + MARGIN
    assert described.seconds >= needed


def test_the_ports_agree() -> None:
    port, admin = Settings.model_fields["port"].default, Settings.model_fields["admin_port"].default
    assert f"EXPOSE {port} {admin}" in (DEPLOY / "Containerfile").read_text()
    services = load("compose.yaml")["services"]
    assert [entry.rpartition(":")[2] for entry in services["gateway"]["ports"]] == [str(port), str(admin)]
    (container,) = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert {entry["name"]: entry["containerPort"] for entry in container["ports"]} == {"http": port, "admin": admin}
    jobs = {job["job_name"]: job for job in load("prometheus/prometheus.yaml")["scrape_configs"]}
    assert jobs["sluice"]["static_configs"] == [{"targets": [f"gateway:{admin}"]}]
    receivers = load("otel/collector.yaml")["receivers"]["otlp"]["protocols"]
    endpoint = services["gateway"]["environment"]["SLUICE_OTLP_ENDPOINT"]
    assert endpoint.rpartition(":")[2] == receivers["grpc"]["endpoint"].rpartition(":")[2]


def test_the_admin_port_is_scraped_with_its_key() -> None:
    jobs = {job["job_name"]: job for job in load("prometheus/prometheus.yaml")["scrape_configs"]}
    secrets = load("compose.yaml")["services"]["prometheus"]["secrets"]
    assert jobs["sluice"]["authorization"]["credentials_file"] in [f"/run/secrets/{name}" for name in secrets]
    monitor = load("kubernetes/servicemonitor.yaml")["spec"]["endpoints"][0]
    secret = load("kubernetes/secret.yaml")
    assert monitor["authorization"]["credentials"]["name"] == secret["metadata"]["name"]
    assert monitor["authorization"]["credentials"]["key"] in secret["stringData"]


def test_probes_ask_what_the_gateway_answers() -> None:
    (container,) = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/startupz",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    ports = {name: probe["port"] for name, probe in probes.items()}
    assert set(ports.values()) == {"admin"}, "a flood must neither restart a pod nor take it out of service"
    assert deployed().environment["SLUICE_ADMIN_HOST"] == "0.0.0.0", "the kubelet asks from outside the pod"


def test_a_service_of_the_same_name_does_not_set_the_port() -> None:
    names = [resource["metadata"]["name"] for _, resource in resources() if resource["kind"] == "Service"]
    assert "sluice" in names
    assert load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_state_is_kept_where_the_image_and_the_volumes_have_it() -> None:
    assert image()["SLUICE_STATE_DIR"].startswith("/var/lib/sluice/")
    (container,) = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {"/var/lib/sluice", "/var/cache/sluice", "/etc/sluice/policy"} <= set(mounts)


def test_the_policy_of_the_cluster_is_valid() -> None:
    ((name, text),) = load("kubernetes/policy.yaml")["data"].items()
    assert parse_policy({name: text.encode()}).classes


def test_nothing_secret_is_in_the_files() -> None:
    for path in (path for path in DEPLOY.rglob("*") if path.is_file()):
        assert not re.search(r"\b[0-9a-f]{32,}\b|sk-sluice-", path.read_text()), path


def test_every_yaml_file_is_one() -> None:
    for path in {*DEPLOY.rglob("*.yaml")} - {*(DEPLOY / "helm" / "templates").iterdir()}:
        assert list(yaml.safe_load_all(path.read_text())), path
