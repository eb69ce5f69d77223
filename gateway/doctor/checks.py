"""All checks before a gateway is started. They serve nothing and write nothing."""

from gateway.doctor import file_checks, machine_checks, model_checks, network_checks, store_checks
from gateway.doctor.check import Check
from gateway.settings.settings import Settings


def machine() -> list[Check]:
    return [
        machine_checks.python(),
        machine_checks.torch_build(),
        machine_checks.kernels(),
        machine_checks.core(),
        machine_checks.clock(),
    ]


def configuration(settings: Settings) -> list[Check]:
    """Check the settings against this machine as it is now."""
    return [
        machine_checks.gpu(settings.device),
        model_checks.threads(settings),
        *model_checks.model(settings),
        file_checks.open_files(settings),
        file_checks.state_dir(settings),
        file_checks.policy(settings),
        *model_checks.floors(settings),
        file_checks.keys(settings),
        file_checks.tls(settings),
        *network_checks.ports(settings),
        *store_checks.store(settings),
        network_checks.collector(settings),
        network_checks.otel(),
    ]
