"""What a benchmark sends: tenants with their keys, traffic and targets, as flags or a YAML file say it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from labs.bench.workloads import WORKLOADS, Lengths
from labs.simulation.errors import OptionError, SimulationError
from quotas.policy import units

KEY_VARIABLE = "OPENAI_API_KEY"


def _seconds(value: object) -> object:
    return units.positive_duration(value) if isinstance(value, str) else value


def _known(name: str) -> str:
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name}: {', '.join(WORKLOADS)}")
    return name


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]
Moment = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(BaseModel):
    """A part of a scenario, checked when it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Targets(Part):
    """What a good request meets; None: anything."""

    ttft: Seconds | None = None
    per_token: Seconds | None = None  # after the first, on average
    total: Seconds | None = None


class LengthsSpec(Part):
    """Log-normal lengths in tokens."""

    median: Positive
    sigma: Annotated[float, Field(ge=0, le=3)] = 0.0


def _lengths(given: int | LengthsSpec | None) -> Lengths | None:
    if given is None:
        return None
    return Lengths(given) if isinstance(given, int) else Lengths(given.median, given.sigma)


class TenantTraffic(Part):
    """One tenant, and its requests. One of `rate`, `trace` and `clients` sets the pace."""

    key: str = ""
    key_env: str = ""  # the variable that holds the key
    weight: Positive = 1.0  # as the server's policy has it
    model: str = ""  # empty: the server's first
    workload: Annotated[str, BeforeValidator(_known)] = "chat"
    prompt_tokens: Annotated[int, Field(ge=1)] | LengthsSpec | None = None  # None: the workload's
    output_tokens: Annotated[int, Field(ge=1)] | LengthsSpec | None = None
    rate: Positive | None = None  # sessions a second
    burstiness: Positive = 1.0  # shape of the gamma distribution between arrivals; 1: Poisson; less: burstier
    trace: Path | None = None
    speed: Positive = 1.0  # times as fast as the trace
    clients: Annotated[int, Field(ge=1)] | None = None
    start: Moment = 0.0  # of its sessions, from the benchmark's start
    stop: Seconds | None = None  # None: with the arrivals of the scenario
    think: Moment = 0.0  # mean, between a client's sessions
    service_tier: str = ""
    deadline: Seconds | None = None  # to the last token, which Sluice is told
    first_token_deadline: Seconds | None = None
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}  # more fields of each request
    leave: Share = 0.0  # of the requests, cut at a random token
    slow: Share = 0.0  # read slowly
    retries: Annotated[int, Field(ge=0, le=10)] = 0  # as the openai package does; its default is 2
    targets: Targets | None = None  # None: the scenario's

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        given = [name for name in ("rate", "trace", "clients") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of rate, trace and clients sets the pace, not {' and '.join(given) or 'none'}"
            )
        if self.trace is not None and {"prompt_tokens", "output_tokens"} & self.model_fields_set:
            raise ValueError("a trace has its own lengths: leave prompt_tokens and output_tokens out")
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop ({self.stop:g} s) must be after start ({self.start:g} s)")
        return self

    @property
    def prompt_lengths(self) -> Lengths | None:
        """The given lengths; None: the workload's."""
        return _lengths(self.prompt_tokens)

    @property
    def output_lengths(self) -> Lengths | None:
        return _lengths(self.output_tokens)

    @property
    def secret(self) -> str:
        """The key. Raises `OptionError` if its variable is not set."""
        if not self.key_env:
            return self.key or os.environ.get(KEY_VARIABLE, "")
        if self.key_env not in os.environ:
            raise OptionError("key_env", self.key_env, "no such variable is set")
        return os.environ[self.key_env]

    def request_headers(self) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.secret}"} if self.secret else {}
        if self.deadline is not None:
            headers["x-sluice-deadline-ms"] = f"{1000 * self.deadline:.0f}"
        if self.first_token_deadline is not None:
            headers["x-sluice-ttft-ms"] = f"{1000 * self.first_token_deadline:.0f}"
        return headers | self.headers

    def at_load(self, load: float) -> "TenantTraffic":
        """Return the traffic at a multiple of its pace."""
        if self.rate is not None:
            return self.model_copy(update={"rate": self.rate * load})
        if self.clients is not None:
            return self.model_copy(update={"clients": max(1, round(self.clients * load))})
        return self.model_copy(update={"speed": self.speed * load})


class Scenario(Part):
    """A benchmark: arrivals for `seconds`, then at most `drain` until all is answered."""

    tenants: Annotated[dict[str, TenantTraffic], Field(min_length=1, max_length=1000)]
    seconds: Seconds = 30.0
    warm_up: Moment = 0.0  # of these, not counted
    drain: Seconds = 60.0
    timeout: Seconds = 600.0  # of a request, from the moment it was due
    seed: int = 1
    targets: Targets = Targets()
    phases: dict[str, tuple[Moment, Moment]] = {}  # from and to, each summed up by itself too

    @model_validator(mode="after")
    def _counts_something(self) -> Self:
        for name, (begin, end) in self.phases.items():
            if not begin < end <= self.seconds:
                raise ValueError(f"the phase {name} must begin before it ends, within {self.seconds:g} s")
        if self.warm_up >= self.seconds:
            raise ValueError(f"warm_up ({self.warm_up:g} s) leaves nothing of {self.seconds:g} s to count")
        return self

    @classmethod
    def parse(cls, document: object, place: str) -> "Scenario":
        """Raises `ScenarioError`, which names each wrong field."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise ScenarioError(place, error) from None

    @classmethod
    def read(cls, path: Path, changes: Mapping[str, object]) -> "Scenario":
        """Read a YAML file; `changes` replace its fields. Raises `ScenarioError`, `OptionError`."""
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise OptionError("--scenario", str(path), f"cannot be read: {error}") from None
        if not isinstance(document, dict):
            raise OptionError("--scenario", str(path), "a mapping with tenants is expected")
        for tenant in (document.get("tenants") or {}).values():
            if isinstance(tenant, dict) and isinstance(tenant.get("trace"), str):
                tenant["trace"] = path.parent / tenant["trace"]
        return cls.parse({**document, **changes}, str(path))

    def targets_of(self, tenant: str) -> Targets:
        return self.tenants[tenant].targets or self.targets

    def without_keys(self) -> dict[str, Any]:
        """Return the scenario as JSON holds it, without secrets."""
        secret = {"key", "headers"}
        return self.model_dump(mode="json", exclude={"tenants": dict.fromkeys(self.tenants, secret)})

    def at_load(self, load: float) -> "Scenario":
        """Return the scenario with each tenant at a multiple of its pace."""
        return self.model_copy(update={"tenants": {name: one.at_load(load) for name, one in self.tenants.items()}})


class ScenarioError(SimulationError):
    """A scenario makes no sense; each wrong field is named with its path."""

    def __init__(self, place: str, error: ValidationError) -> None:
        lines = []
        for one in error.errors(include_url=False):
            path = ".".join(str(part) for part in one["loc"]) or "the scenario"
            lines.append(f"{place}: {path}: {one['msg'].removeprefix('Value error, ')}")
        super().__init__("\n".join(lines))
