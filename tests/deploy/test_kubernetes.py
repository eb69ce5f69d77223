"""The manifests: valid against Kubernetes' schemas, complete, restricted."""

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from gateway.settings.settings import Settings
from tests.deploy.documented import DEPLOY
from tests.deploy.gateways import load, picking, resources

VERSION = "1.31"
CUSTOM = {"HTTPRoute", "InferencePool"}  # of the Gateway API and its inference extension
FOREIGN = {"ServiceMonitor", *CUSTOM}  # no kinds of Kubernetes' own
SELECTORS = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector", "InferencePool": "selector"}
CRDS = os.environ.get("SLUICE_CRDS")  # folder with the definitions of CUSTOM, which are others' and not kept here
RESOURCES = list(resources())
OWN = [(name, resource) for name, resource in RESOURCES if resource["kind"] not in FOREIGN]


@pytest.mark.parametrize(
    ("name", "resource"), OWN, ids=lambda value: value if isinstance(value, str) else value["kind"]
)
def test_a_manifest_is_valid(name: str, resource: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes_validate.validate(resource, VERSION, strict=True)


@pytest.mark.skipif(CRDS is None, reason="SLUICE_CRDS names no folder of custom resource definitions")
@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_a_custom_resource_is_as_its_definition_has_it(kind: str) -> None:
    definitions = [yaml.safe_load(path.read_text()) for path in Path(CRDS or "").glob("*.yaml")]
    (definition,) = [one["spec"] for one in definitions if one["spec"]["names"]["kind"] == kind]
    for _, resource in RESOURCES:
        if resource["kind"] == kind:
            group, _, version = resource["apiVersion"].partition("/")
            assert group == definition["group"]
            (served,) = [one for one in definition["versions"] if one["name"] == version and one["served"]]
            jsonschema.validate(resource, closed(served["schema"]["openAPIV3Schema"]))


def closed(schema: Any) -> Any:
    """A definition's schema, by which a field that it does not name is a mistake."""
    if isinstance(schema, list):
        return [*map(closed, schema)]
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema and "additionalProperties" not in schema:
        schema = {**schema, "additionalProperties": False}
    kept = {"type", "required"}
    return {name: value if name in kept else closed(value) for name, value in schema.items()}


def test_a_route_leads_to_the_pool_of_the_replicas_and_the_pool_to_its_picker() -> None:
    route, pool = load("kubernetes/gateway/httproute.yaml"), load("kubernetes/gateway/inferencepool.yaml")
    ((backend,),) = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    assert (backend["group"], backend["kind"]) == (pool["apiVersion"].partition("/")[0], pool["kind"])
    assert backend["name"] == pool["metadata"]["name"]
    (container,) = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    reference, service = pool["spec"]["endpointPickerRef"], load("kubernetes/gateway/service.yaml")
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    picker = load("kubernetes/gateway/deployment.yaml")["spec"]["template"]
    (container,) = picker["spec"]["containers"]
    picks = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert picks["grpc"] == reference["port"]["number"] == int(picking().environment["SLUICE_PORT"])
    assert not pool["spec"]["selector"]["matchLabels"].items() <= picker["metadata"]["labels"].items()
    name, port, admin = container["args"][-1].split(":")
    assert (int(port), int(admin)) == (ports["http"], ports["admin"])
    headless = [one for _, one in OWN if one["kind"] == "Service" and one["metadata"]["name"] == name]
    assert [one["spec"]["clusterIP"] for one in headless] == ["None"]


@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes/gateway"])
def test_every_manifest_is_applied(folder: str) -> None:
    """`kubectl apply -f` takes each .yaml of a folder for a manifest, and `apply -k` the listed ones."""
    files = {path.name for path in (DEPLOY / folder).iterdir() if path.is_file()}
    assert files == {"Kustomization", *load(f"{folder}/Kustomization")["resources"]}


def test_names_that_are_referred_to_exist() -> None:
    named = {(resource["kind"], resource["metadata"]["name"]) for _, resource in OWN}
    maps = {name for kind, name in named if kind == "ConfigMap"}
    for path in ("kubernetes/deployment.yaml", "kubernetes/gateway/deployment.yaml"):
        pod = load(path)["spec"]["template"]["spec"]
        for entry in pod["containers"][0]["env"]:
            if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                assert ("Secret", reference["name"]) in named
                assert reference["key"] in load("kubernetes/secret.yaml")["stringData"]
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
        for _, resource in RESOURCES
        for kind, field in SELECTORS.items()
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


def test_an_upgrade_always_leaves_a_replica_to_serve() -> None:
    for path in ("kubernetes/deployment.yaml", "kubernetes/gateway/deployment.yaml"):
        spec = load(path)["spec"]
        assert spec["replicas"] >= 2
        assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert load("kubernetes/horizontalpodautoscaler.yaml")["spec"]["minReplicas"] >= 2
