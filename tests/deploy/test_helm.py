"""The Helm chart, which is the manifests with values: rendered by Helm's own engine, and held to them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.version import VERSION
from tests.deploy.documented import DEPLOY, ROOT
from tests.deploy.gateways import load

CHART = DEPLOY / "helm"
HELM = (
    "helm-python-sdk==0.2.2"  # Helm 4 as a library: 250 MB, so it is in no environment and these tests are the night's
)
PROGRAM = """
import json, sys
import helm_python as helm

chart, values = sys.argv[1], json.loads(sys.argv[2])
with helm.Chart.load(chart) as loaded:
    loaded.validate_schema(values)
    print(json.dumps({"lint": helm.lint(chart), "rendered": loaded.render(values, name="own", namespace="prod")}))
"""
SECRET = {"pepper": "a" * 64, "adminKey": "b" * 64}
KINDS_WITHOUT_SCHEMA = {"ServiceMonitor", "HTTPRoute", "InferencePool"}
Rendered = dict[tuple[str, str], dict[str, Any]]


def test_the_chart_is_of_this_version_and_its_values_are_what_its_schema_allows() -> None:
    chart, values = load("helm/Chart.yaml"), load("helm/values.yaml")
    assert chart["version"] == chart["appVersion"] == VERSION
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    assert values.keys() == schema["properties"].keys() - {"global"}
    assert (CHART / "manifests").resolve() == DEPLOY / "kubernetes"


@pytest.fixture(scope="module")
def helm() -> Iterator[Path]:
    with TemporaryDirectory(prefix="sluice-helm-") as folder:
        subprocess.run([ROOT / "scripts" / "install", "--target", folder, HELM], check=True, capture_output=True)
        yield Path(folder)


def run(helm: Path, values: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-c", PROGRAM, CHART, json.dumps(values)]
    environ = os.environ | {"PYTHONPATH": str(helm)}
    return subprocess.run(program, env=environ, capture_output=True, text=True, check=False)


def render(helm: Path, **values: Any) -> Rendered:
    done = run(helm, values)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert not told["lint"]["errors"]
    return by_name("\n---\n".join(told["rendered"].values()))


def by_name(text: str) -> Rendered:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


@pytest.mark.nightly
def test_the_chart_without_values_is_the_manifests(helm: Path) -> None:
    left_out = {"namespace.yaml", "horizontalpodautoscaler.yaml", "servicemonitor.yaml"}
    files = [DEPLOY / "kubernetes" / name for name in load("kubernetes/Kustomization")["resources"]]
    manifests = by_name("\n---\n".join(file.read_text() for file in files if file.name not in left_out))
    container = manifests["Deployment", "sluice"]["spec"]["template"]["spec"]["containers"][0]
    container["image"] = f"sluice:{VERSION}"
    manifests["Secret", "sluice"]["stringData"] |= {"pepper": SECRET["pepper"], "admin-key": SECRET["adminKey"]}
    assert render(helm, secret=SECRET) == manifests


@pytest.mark.nightly
def test_every_value_is_where_it_belongs_and_the_manifests_are_valid(helm: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    rendered = render(
        helm,
        image={"repository": "registry.example/sluice", "tag": "1"},
        replicas=3,
        env={"SLUICE_MODEL": "hf:Qwen/Qwen3-0.6B", "SLUICE_THREADS": 2, "SLUICE_DRAIN_DELAY": 20},
        resources={"limits": {"nvidia.com/gpu": 1}},
        policy="tenants: {acme: }\n",
        existingSecret="vault",
        store=False,
        autoscaler=True,
        serviceMonitor=True,
        inferenceGateway=True,
        patches={"Deployment/sluice": {"spec": {"template": {"spec": {"nodeSelector": {"gpu": "h100"}}}}}},
    )
    for (kind, _), manifest in rendered.items():
        if kind not in KINDS_WITHOUT_SCHEMA:
            kubernetes_validate.validate(manifest, "1.31", strict=True)
    assert not {("Secret", "sluice"), ("StatefulSet", "sluice-store")} & rendered.keys()
    assert {("HorizontalPodAutoscaler", "sluice"), ("InferencePool", "sluice")} <= rendered.keys()
    deployment = rendered["Deployment", "sluice"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert (deployment["replicas"], pod["nodeSelector"], pod["enableServiceLinks"]) == (3, {"gpu": "h100"}, False)
    assert (container["image"], container["resources"]) == (
        "registry.example/sluice:1",
        {"limits": {"nvidia.com/gpu": 1}},
    )
    env = {entry["name"]: entry for entry in container["env"]}
    assert (env["SLUICE_MODEL"]["value"], env["SLUICE_THREADS"]["value"]) == ("hf:Qwen/Qwen3-0.6B", "2")
    assert env["SLUICE_DRAIN_DELAY"]["value"] == "20" and len(env) == len(container["env"])
    assert env["SLUICE_PEPPER"]["valueFrom"]["secretKeyRef"]["name"] == "vault"
    assert rendered["ConfigMap", "sluice-policy"]["data"] == {"policy.yaml": "tenants: {acme: }\n"}
    (endpoint,) = rendered["ServiceMonitor", "sluice"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == "vault"
    (picker,) = rendered["Deployment", "sluice-picker"]["spec"]["template"]["spec"]["containers"]
    assert picker["image"] == container["image"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "secret.pepper or existingSecret is needed"),
        ({"secret": SECRET | {"pepper": "short"}}, "pepper"),
        ({"existingSecret": "vault", "replica": 3}, "replica"),
        ({"existingSecret": "vault", "env": {"lower": "x"}}, "lower"),
    ],
)
def test_a_mistaken_value_is_refused_by_its_name(helm: Path, values: dict[str, Any], complaint: str) -> None:
    done = run(helm, values)
    assert done.returncode != 0
    assert complaint in done.stderr
