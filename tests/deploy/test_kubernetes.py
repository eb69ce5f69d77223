"""The manifests: valid against Kubernetes' schemas, complete, restricted."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.settings.settings import Settings
from tests.deploy.documented import DEPLOY
from tests.deploy.gateways import load, resources

VERSION = "1.31"
FOREIGN = {"ServiceMonitor", "Kustomization"}  # no kinds of Kubernetes' own
RESOURCES = list(resources())
OWN = [(name, resource) for name, resource in RESOURCES if resource["kind"] not in FOREIGN]


@pytest.mark.parametrize(
    ("name", "resource"), OWN, ids=lambda value: value if isinstance(value, str) else value["kind"]
)
def test_a_manifest_is_valid(name: str, resource: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes_validate.validate(resource, VERSION, strict=True)


def test_every_manifest_is_applied() -> None:
    listed = load("kubernetes/kustomization.yaml")
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    generated = {file for generator in listed["configMapGenerator"] for file in generator["files"]}
    assert files - {*listed["resources"], *generated} == {"kustomization.yaml", "prometheus-adapter.yaml"}


def test_names_that_are_referred_to_exist() -> None:
    named = {(resource["kind"], resource["metadata"]["name"]) for _, resource in OWN}
    pod = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    for entry in pod["containers"][0]["env"]:
        if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
            assert ("Secret", reference["name"]) in named
            assert reference["key"] in load("kubernetes/secret.yaml")["stringData"]
    maps = {entry["name"] for entry in load("kubernetes/kustomization.yaml")["configMapGenerator"]}
    assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} <= maps
    target = load("kubernetes/horizontalpodautoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in named


def test_the_template_of_the_secret_opens_nothing_until_it_is_filled_in() -> None:
    template = load("kubernetes/secret.yaml")["stringData"]
    for field, key in (("pepper", "pepper"), ("admin_key", "admin-key")):
        with pytest.raises(ValidationError, match="placeholder"):
            Settings(**{field: template[key]})


def test_selectors_find_their_pods() -> None:
    templates = [
        resource["spec"]["template"]["metadata"]["labels"]
        for _, resource in OWN
        if resource["kind"] in ("Deployment", "StatefulSet")
    ]
    selectors = [resource["spec"]["selector"] for _, resource in OWN if resource["kind"] == "Service"]
    selectors += [
        resource["spec"][field]["matchLabels"]
        for _, resource in OWN
        for field, kind in (("selector", "PodDisruptionBudget"), ("podSelector", "NetworkPolicy"))
        if resource["kind"] == kind
    ]
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in templates), selector


def test_pods_are_restricted() -> None:
    workloads = [resource for _, resource in OWN if resource["kind"] in ("Deployment", "StatefulSet")]
    for pod in (resource["spec"]["template"]["spec"] for resource in workloads):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


def test_an_upgrade_never_leaves_nobody_to_serve() -> None:
    spec = load("kubernetes/deployment.yaml")["spec"]
    assert spec["replicas"] >= 2
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert load("kubernetes/horizontalpodautoscaler.yaml")["spec"]["minReplicas"] >= 2
