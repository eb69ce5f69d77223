"""Tells an operator, once the gateway serves, where it listens and how to send a first request."""

import json
from dataclasses import dataclass, field
from ipaddress import ip_address
from shlex import quote

from gateway.settings.settings import format_bytes

PROMPT = "Count from 3 to 12."


@dataclass(frozen=True, slots=True)
class Ready:
    """Describes a gateway that accepts requests; `str` of it is the announcement."""

    version: str
    host: str
    port: int  # the bound port
    tls: bool
    model: str  # the served name
    num_parameters: int
    dtype: str
    device: str
    num_blocks: int
    kv_tokens: int  # of texts of `max_model_len`, as many as the KV cache holds
    kv_bytes: int
    max_model_len: int  # tokens
    batch_invariant: bool  # whether a seed draws the same text in every batch
    demo_key: str | None = field(repr=False)  # None: there is none, or what is said here may be read by others
    admin_port: int | None = None  # None: there is none
    admin_host: str = "127.0.0.1"
    admin_key: str = ""  # where it is
    num_http_workers: int = 0
    default_tools: bool = False  # whether the chat template has no place for tools of its own

    @property
    def admin_url(self) -> str:
        """Returns the address of the admin page for a browser on this machine."""
        return f"{self._scheme}://{_reachable(self.admin_host)}:{self.admin_port}"

    @property
    def _scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def url(self) -> str:
        """Returns the address at which a client on this machine reaches the gateway."""
        return f"{self._scheme}://{_reachable(self.host)}:{self.port}"

    def __str__(self) -> str:
        tokens = f"{self.kv_tokens:,} tokens in {self.num_blocks:,} blocks"
        lines = [
            f"Sluice {self.version} is ready at {self.url}",
            "",
            f"  model     {self.model}: {_count(self.num_parameters)} parameters, {self.dtype}, on {self.device}",
            f"  KV cache  {format_bytes(self.kv_bytes)}: {tokens}, at most {self.max_model_len:,} tokens a request",
        ]
        if self.num_http_workers:
            lines += [f"  HTTP      {self.num_http_workers} worker{'s' if self.num_http_workers > 1 else ''}"]
        if self.default_tools:
            lines += ["  tools     told by a text of ours: the model's chat template has no place for them"]
        if not self.batch_invariant:
            lines += [
                "  seeds     may draw other text beside other requests: these kernels add in an order of the batch's"
            ]
        if self.demo_key is not None:
            lines += [f"  demo key  {self.demo_key}"]
        if self.admin_port is not None:
            lines += [f"  admin     {self.admin_url}, its key in {self.admin_key}"]
        return "\n".join([*lines, "", "Try it:", "", self.curl(), ""])

    def curl(self) -> str:
        """Returns one line for a shell that streams an answer."""
        body = {"model": self.model, "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
        key = self.demo_key if self.demo_key is not None else "YOUR_KEY"
        return (
            f"curl -N {self.url}/v1/chat/completions -H {quote(f'Authorization: Bearer {key}')} "
            f"-H 'Content-Type: application/json' -d {quote(json.dumps(body))}"
        )


def _reachable(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
