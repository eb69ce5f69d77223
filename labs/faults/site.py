"""What a scenario is played on: a quota store, one gateway or a router with several, and proxies between them.

Each is a process of its own, of the same programs that a user starts. A gateway or router that ends is started again
by `Site.tick`, as a supervisor would.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from backend.bound_process import bound
from backend.timed_run import end_group
from gateway.doctor.snapshot import Samples
from gateway.tenants.key_store import KeyStore
from labs.benchmarks.own_environment import own_environment
from labs.benchmarks.processes import ROOT, WorkerFailed, free_port
from labs.benchmarks.redis_server import server_command
from labs.benchmarks.served import make_keys
from labs.faults.proxy import Proxy

START_SECONDS = 120.0
READ_SECONDS = 30.0
SETTLE_SECONDS = 45.0  # in which nothing of any request may be left
STOP_SECONDS = 20.0  # after which a program that does not stop is killed
LEASE_SECONDS = 6.0  # of quotas, which bounds what a killed gateway holds
FAKETIME = "libfaketime==3.0.1"
FLAGS = {
    "admin_host": "127.0.0.1",
    "threads": 1,
    "http_workers": 0,
    "max_num_seqs": 8,
    "calibration": "off",
    "quota_lease": LEASE_SECONDS,
    "drain_timeout": 5,
    "log_level": "warning",
    "log_format": "json",
}
LEFT = (  # metrics, without `sluice_`, that are 0 without load
    "live_requests",
    "kv_blocks_used",
    "reservations_outstanding",
    "orphans",
    "stalled_writes",
)
OF_ROUTER = ("write_timeout", "drain_timeout")  # flags that a router has too
TARGETS = ("store", "router", "gateway", "gateway0", "gateway1", "gateways", "all")  # of `Site.named`
LINKS = ("clients", "replicas", "store")  # where a proxy may be: before the front, each gateway, the store


class Process:
    """One program of the site, which may be killed and started again at the same addresses."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            end_group(self._process)
        with self.log.open("ab") as said:
            self._process = subprocess.Popen(
                **bound(self._command),
                cwd=ROOT,
                env={**os.environ, **self._environ},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def limit_memory(self, room: int | None) -> None:
        """Let it take `room` bytes of addresses more, or for None any number."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
        most = resource.RLIM_INFINITY if room is None else pages * os.sysconf("SC_PAGE_SIZE") + room
        self._limit(resource.RLIMIT_AS, most)

    def limit_files(self, most: int | None) -> None:
        """Let no file grow beyond `most` bytes, as on a full disk (with EFBIG in place of ENOSPC)."""
        self._limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY if most is None else most)

    def _limit(self, what: int, most: int) -> None:
        resource.prlimit(self.pid, what, (most, resource.prlimit(self.pid, what)[1]))

    def stop(self) -> None:
        """Let it stop in order, and wait for that."""
        if self._process is not None:
            self.signal(signal.SIGCONT)
            end_group(self._process, STOP_SECONDS)


class Site:
    """A store, `replicas` gateways, and a router before them if there are several. Use once."""

    def __init__(
        self,
        folder: Path,
        policy: Mapping[str, Any],
        flags: Mapping[str, object],
        *,
        replicas: int = 1,
        altered: str = "",
        links: Sequence[str] = (),
        has_clock: bool = False,
        has_logs: bool = False,
    ) -> None:
        """`flags` of each gateway, by their names; `altered` of `labs.faults.altered`; `links` of `LINKS` with a proxy;
        `has_clock`: their calendar may be set; `has_logs`: gateways write event logs.
        """
        self._folder, self.policy = folder, deepcopy(dict(policy))
        self._stack = ExitStack()
        self.keys = make_keys(self._state, self.policy["tenants"])
        self._clock = folder / "clock" if has_clock else None
        self._program = ["-m", "labs.faults.altered", altered] if altered else ["-m", "sluice"]
        self.processes: dict[str, Process] = {}
        self.links: dict[str, list[Proxy]] = {link: [] for link in LINKS}
        self._proxied = links
        self._admin_ports: dict[str, int] = {}
        self.url = self._front = ""
        self._flags, self._replicas = {**FLAGS, **flags}, replicas
        self._has_logs = has_logs

    @property
    def _state(self) -> Path:
        return self._folder / "state"

    @property
    def _policy_path(self) -> Path:
        return self._folder / "policy.yaml"

    def __enter__(self) -> Self:
        self.write_policy()
        self.set_clock(0.0)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._admin_ports:
            self.processes[name].signal(signal.SIGTERM)  # all at once; then each is waited for
        self._stack.close()

    def _start(self) -> None:
        store = free_port()
        self._run("store", server_command(self._folder, store))
        addresses = []
        for number in range(self._replicas):
            name, port, admin = f"gateway{number}", free_port(), free_port()
            redis = f"redis://127.0.0.1:{self._through('store', store)}/0"
            own = {"port": port, "admin_port": admin, "redis_url": redis, "policy": self._policy_path}
            if self._has_logs:
                own["event_log"] = self._folder / f"{name}.events"
            self._serve(name, "serve", {**self._flags, **own, "state_dir": self._state}, admin)
            addresses.append((self._through("replicas", port) if self._replicas > 1 else port, admin))
        front = addresses[0][0]
        if self._replicas > 1:
            file, front, admin = self._folder / "replicas.yaml", free_port(), free_port()
            at = "http://127.0.0.1:{}".format
            rows = [{"url": at(port), "admin": at(admin)} for port, admin in addresses]
            file.write_text(yaml.safe_dump({"replicas": rows}))
            own = {"port": front, "admin_port": admin, "replicas": file, "policy": self._policy_path}
            own |= {flag: value for flag, value in self._flags.items() if flag in OF_ROUTER}
            self._serve("router", "route", {**own, "state_dir": self._state, "log_level": "warning"}, admin)
        for name in self._admin_ports:
            self._until_ready(name)
        self._front = f"http://127.0.0.1:{front}"
        self.url = f"http://127.0.0.1:{self._through('clients', front)}"

    def _serve(self, name: str, command: str, flags: Mapping[str, object], admin: int) -> None:
        named = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        self._admin_ports[name] = admin
        self._run(name, [sys.executable, *self._program, command, *named])

    def _run(self, name: str, command: Sequence[str]) -> None:
        environ = {} if self._clock is None else _faked(self._clock)
        process = self.processes[name] = Process(name, command, self._folder / f"{name}.log", environ)
        process.start()
        self._stack.callback(process.stop)

    def _through(self, link: str, port: int) -> int:
        """The port of a new proxy before this one, if the link has proxies."""
        if link not in self._proxied:
            return port
        proxy = self._stack.enter_context(Proxy(port))
        self.links[link].append(proxy)
        return proxy.port

    def _until_ready(self, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready(name):
            if not self.processes[name].is_running or time.monotonic() > deadline:
                raise WorkerFailed(f"{name} did not start: {self.processes[name].log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _is_ready(self, name: str) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._admin_ports[name]}/readyz").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def named(self, target: str) -> list[Process]:
        """The processes of a name: `store`, `router`, `gateway` (the first), `gateway1`, `gateways` or `all`."""
        if target in ("gateways", "all"):
            return [one for name, one in self.processes.items() if target == "all" or name.startswith("gateway")]
        return [self.processes[{"gateway": "gateway0"}.get(target, target)]]

    def tick(self, _: object = None) -> None:
        """Start again what has ended."""
        for name in self._admin_ports:
            if not self.processes[name].is_running:
                self.processes[name].start()

    def write_policy(self, text: str = "") -> None:
        """Replace the policy's file in one piece, by `policy` or by this text."""
        part = self._policy_path.with_suffix(".part")
        part.write_text(text or yaml.safe_dump(self.policy))
        part.rename(self._policy_path)

    def set_clock(self, seconds: float) -> None:
        """Set the calendar of all processes this much after the machine's."""
        if self._clock is not None:
            part = self._clock.with_suffix(".part")
            part.write_text(f"{seconds:+.3f}")
            part.rename(self._clock)

    def metrics(self) -> dict[str, float]:
        """The metrics of all gateways by name, summed over labels and processes."""
        return summed("\n".join(self._ask(name, "/metrics").text for name in self._admin_ports))

    def settled(self) -> dict[str, float]:
        """What is left of requests, once that is nothing, or after `SETTLE_SECONDS`; `held`: at the store."""
        for name in self._admin_ports:
            self.tick()
            self._until_ready(name)
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            metrics = self.metrics()
            left = {name: metrics.get(f"sluice_{name}", 0.0) for name in LEFT} | {"held": self._held()}
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(0.2)

    def _held(self) -> float:
        """Requests that run by the store's account, of tenants with a limit of them."""
        held = 0.0
        for key in self.keys.values():
            reply = httpx.get(
                f"{self._front}/v1/limits", headers={"authorization": f"Bearer {key}"}, timeout=READ_SECONDS
            )
            limits = reply.json().get("data", ())
            running = [limit for limit in limits if limit["resource"] == "concurrent_requests"]
            held += sum(int(limit["amount"]) - int(limit["remaining"]) for limit in running)
        return held

    def _ask(self, name: str, path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self._admin_ports[name]}{path}"
        admin = {"authorization": f"Bearer {KeyStore(self._state).admin_key()}"}
        return httpx.get(url, headers=admin, timeout=READ_SECONDS).raise_for_status()

    def event_logs(self) -> Iterable[Path]:
        """Whole once the gateways have stopped."""
        return self._folder.glob("*.events")

    def last_logged(self, count: int = 5) -> Iterable[str]:
        """The last lines of gateways' and router's logs: a replica that was given up, a machine that stood still."""
        for name in self._admin_ports:
            lines = [line for line in self.processes[name].log.read_text().splitlines() if line.startswith("{")]
            yield from (f"{name}: {line}" for line in lines[-count:])

    def complaints(self) -> list[str]:
        """Errors that gateways and router logged, and tracebacks."""
        lines = [line for name in self._admin_ports for line in self.processes[name].log.read_text().splitlines()]
        errors = [str(error["message"]) for error in logged_errors(lines)]
        return errors + [line for line in lines if line.startswith("Traceback")]


def summed(text: str) -> dict[str, float]:
    """Metrics by name, summed over labels."""
    samples = Samples.parse(text)
    return {name: samples.total(name) for name in samples.series}


def logged_errors(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The errors of a log in JSON."""
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in logged if line.get("level") in {"ERROR", "CRITICAL"}]


def _faked(clock: Path) -> dict[str, str]:
    """The environment in which a program reads the calendar from a file; its other clocks are the machine's."""
    programs = own_environment(FAKETIME)
    (library,) = programs.parent.glob("lib/python*/site-packages/libfaketime/vendor/libfaketime/src/libfaketime.so.1")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",  # second, or each call would read the file
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # or each wait for Python's lock ends at once
    }
