"""The image, its entry point, and the compose file."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from backend import compiled_core
from gateway.version import VERSION
from quotas.policy.policy_file import read_policy
from tests.deploy.documented import DEPLOY, ROOT
from tests.deploy.gateways import image, load, resources
from tests.test_wheel import lend

CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
COMPOSE: dict[str, Any] = load("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_image_is_built_in_stages_and_runs_without_privileges() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", CONTAINERFILE, re.MULTILINE)
    assert len(stages) == 2
    assert all("/" not in name for name, _ in stages)
    final = CONTAINERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", final, re.MULTILINE)
    assert 'ENTRYPOINT ["entrypoint.sh"]' in final


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_steps_of_the_image_make_a_gateway_that_is_compiled(tmp_path: Path) -> None:
    """Without a builder of images and its base images: the steps of the first stage in folders of this machine, where
    apt does nothing and torch is lent.
    """
    environment, source, tools = tmp_path / "sluice", tmp_path / "source", tmp_path / "tools"
    stage = CONTAINERFILE.partition("\nFROM ")[2].partition("\nFROM ")[0]
    for line in re.findall(r"^COPY (.+)$", stage, re.MULTILINE):
        *names, _ = line.split()
        for name in names:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            source.mkdir(exist_ok=True)
            copy(ROOT / name, source / name)
    tools.mkdir()
    (tools / "apt-get").symlink_to("/bin/true")
    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = f"{tools}:{Path(sys.executable).parent}:{keep['PATH']}"
    steps = re.findall(r"^RUN ((?:.*\\\n)*.*)$", stage, re.MULTILINE)
    assert len(steps) == 4
    for number, step in enumerate(steps):
        command = ["sh", "-ec", step.replace("/opt/sluice", str(environment))]
        variables = keep | {"PATH": path, "TORCH_INDEX": "lent"}
        done = subprocess.run(command, cwd=source, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{step}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        if number == 0:
            lend(environment)
            if (core := compiled_core.compiled()) is not None:  # or it is compiled, in minutes
                shutil.copytree(core, environment / "share" / "sluice" / core.name)
    program = "from backend import compiled_core; assert compiled_core.use()"
    subprocess.run([environment / "bin" / "python", "-c", program], cwd=tmp_path, env=keep, check=True)
    version = subprocess.run(
        [environment / "bin" / "sluice", "version"], env=keep, capture_output=True, text=True, check=True
    )
    assert VERSION in version.stdout


def test_files_copied_to_the_image_exist_and_are_not_ignored() -> None:
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+)$", CONTAINERFILE, re.MULTILINE):
        *sources, _ = [word for word in line.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored


def test_a_releases_packages_are_pinned_with_hashes_to_the_tested_versions() -> None:
    text = (ROOT / "constraints-hashed.txt").read_text()
    entries = re.findall(
        r"^([a-z0-9-]+)==([^ ;]+)[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+)$", text, re.MULTILINE
    )
    assert len(entries) == len(re.findall(r"^[a-z]", text, re.MULTILINE)), "each has hashes"
    pinned = {name: version for name, version, _ in entries}
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:60])
    tested = {re.sub(r"[-_.]+", "-", name): version for name, version in tested.items() if not name.startswith("#")}
    assert {name: version for name, version in pinned.items() if tested.get(name, version) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + ["mypy", "setuptools", "hatchling"]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0].lower()) for one in needed}  # type: ignore[index]
    assert names <= pinned.keys()
    assert "--require-hashes -r" in CONTAINERFILE


def test_services_name_what_is_declared() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("secrets", ())) <= COMPOSE["secrets"].keys(), name
        named = [volume.partition(":")[0] for volume in service.get("volumes", ())]
        assert {volume for volume in named if "/" not in volume} <= COMPOSE["volumes"].keys(), name
        for path in (volume for volume in named if volume.startswith(".")):
            assert (DEPLOY / path).exists(), path
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_started" or "healthcheck" in SERVICES[other], other


def test_the_policy_is_a_folder_so_that_an_edit_takes_effect() -> None:
    folder = image()["SLUICE_POLICY"]
    (mounted,) = [volume for volume in SERVICES["gateway"]["volumes"] if folder in volume]
    source, target, _ = mounted.split(":")
    assert target == folder, "a file that is mounted stays the one that an editor has replaced"
    assert read_policy(DEPLOY / source) == read_policy(ROOT / "policies" / "default.yaml")


def test_ports_are_open_to_this_machine_alone() -> None:
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", ()))


def test_every_service_gives_up_its_privileges_and_comes_back() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert ":" in service["image"] or name == "gateway", name


def test_the_store_neither_evicts_nor_forgets() -> None:
    (deployed,) = [
        resource["spec"]["template"]["spec"]["containers"][0]["args"]
        for _, resource in resources()
        if resource["kind"] == "StatefulSet"
    ]
    for command in (SERVICES["store"]["command"], deployed):
        assert "--appendonly yes" in " ".join(command)
        assert "--maxmemory-policy noeviction" in " ".join(command)


def entrypoint(tmp_path: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    sluice = tmp_path / "sluice"
    sluice.write_text('#!/bin/sh\necho "$@"\nenv | grep ^SLUICE_ | sort\n')
    sluice.chmod(0o755)
    return subprocess.run(
        [DEPLOY / "entrypoint.sh", "serve", "--port", "9"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_entry_point_reads_secrets_from_files(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_text("secret with $(spaces) and 'quotes'\n")
    done = entrypoint(
        tmp_path, SLUICE_PEPPER_FILE=f"{tmp_path}/pepper", SLUICE_TLS_CERT_FILE="/tls/cert", SLUICE_HOST="0.0.0.0"
    )
    assert done.stdout.splitlines() == [
        "serve --port 9",
        "SLUICE_HOST=0.0.0.0",
        "SLUICE_PEPPER=secret with $(spaces) and 'quotes'",
        "SLUICE_TLS_CERT_FILE=/tls/cert",
    ]


def test_the_entry_point_stops_where_a_secret_is_missing(tmp_path: Path) -> None:
    done = entrypoint(tmp_path, SLUICE_PEPPER_FILE=f"{tmp_path}/nowhere")
    assert done.returncode != 0
    assert done.stdout == ""


def test_the_collector_bounds_its_memory_before_anything_else() -> None:
    collector = load("otel/collector.yaml")
    for name, pipeline in collector["service"]["pipelines"].items():
        assert pipeline["processors"] == ["memory_limiter", "batch"], name
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= collector[part].keys(), name
    assert set(collector["service"]["extensions"]) <= collector["extensions"].keys()


def test_grafana_is_given_the_dashboard_and_its_source() -> None:
    provider = load("grafana/provisioning/dashboards/sluice.yaml")["providers"][0]
    mounted = [volume for volume in SERVICES["grafana"]["volumes"] if provider["options"]["path"] in volume]
    assert mounted == [f"./grafana/sluice.json:{provider['options']['path']}/sluice.json:ro"]
    source = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert source["type"] == "prometheus"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "sluice.service").read_text()
    path = tmp_path / "sluice.service"
    path.write_text(unit.replace("/opt/sluice/bin/sluice serve", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
