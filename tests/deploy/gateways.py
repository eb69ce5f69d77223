"""The gateways that deploy/ describes: the settings and the time to end that each is given."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from gateway.settings.settings import Settings
from tests.deploy.documented import DEPLOY

SECRET = "9f2c41d7b08e63a5" + "c4d1072e8b5f93a6" * 3  # for what is not in the file
FILE_SECRETS = re.compile(r"(SLUICE_(?!TLS_)\w+)_FILE")


@dataclass(frozen=True)
class Gateway:
    """`environment` without secrets, which have a value of the kind that is wanted."""

    environment: dict[str, str]
    seconds: float  # from SIGTERM to SIGKILL

    def settings(self) -> Settings:
        values = {name.removeprefix("SLUICE_").lower(): value for name, value in self.environment.items()}
        return Settings(**{name: value for name, value in values.items() if name in Settings.model_fields})


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def resources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of Kubernetes, with the file of each."""
    folder = DEPLOY / "kubernetes"
    for path in sorted(folder.rglob("*.yaml")):
        for resource in yaml.safe_load_all(path.read_text()):
            yield str(path.relative_to(folder)), resource


def composed() -> Gateway:
    service = load("compose.yaml")["services"]["gateway"]
    environment = {
        (match[1] if (match := FILE_SECRETS.fullmatch(name)) else name): SECRET if match else value
        for name, value in service["environment"].items()
    }
    return Gateway(image() | environment, _seconds(service["stop_grace_period"]))


def deployed(path: str = "kubernetes/deployment.yaml") -> Gateway:
    spec = load(path)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    environment = {entry["name"]: entry.get("value", SECRET) for entry in container["env"]}
    environment["SLUICE_REDIS_URL"] = load("kubernetes/secret.yaml")["stringData"]["redis-url"]
    return Gateway(image() | environment, spec["terminationGracePeriodSeconds"])


def picking() -> Gateway:
    """The endpoint picker of Kubernetes."""
    return deployed("kubernetes/gateway/deployment.yaml")


def managed() -> Gateway:
    """By systemd."""
    text = (DEPLOY / "systemd" / "sluice.service").read_text()
    lines = re.findall(r"^Environment=(.+)$", text, re.MULTILINE)
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(lines)))
    environment |= dict(re.findall(r"^(\w+)=(\S+)$", (DEPLOY / "systemd" / "sluice.env").read_text(), re.MULTILINE))
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    return Gateway(environment, float(seconds))


def image() -> dict[str, str]:
    """The environment that the image sets."""
    text = (DEPLOY / "Containerfile").read_text()
    return dict(re.findall(r"\b(SLUICE_\w+)=(\S+)", text))


def _seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))
