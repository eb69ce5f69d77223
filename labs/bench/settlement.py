"""Whether a Sluice server charged what it told: its account of each tenant before and after, to the token."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from labs.bench.exchange import Exchange, Outcome
from labs.simulation.errors import OptionError

BUDGET_UNITS = ("day", "week", "month")  # windows that do not refill while a benchmark runs
SETTLE_SECONDS = 60.0  # until accounts that still change are taken as they are
LEDGER_STEADY_SECONDS = 6.0  # a ledger is booked every 5 s, a sixth of the default --quota-lease
BUDGET_STEADY_SECONDS = 1.0  # a budget is settled before an answer's last byte; after a cut stream, soon
READ_INTERVAL_SECONDS = 0.5
READ_TIMEOUT_SECONDS = 30.0

Account = dict[str, int]
"""Tokens charged so far, by the server's name of a tenant."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """Tokens of one tenant. Of a stream that its client cut, the server tells no usage at the end."""

    tenant: str
    told: int
    charged: int
    num_cut: int  # streams without a last word, of which the usage or the chunks that came are told

    @property
    def is_exact(self) -> bool:
        return self.told == self.charged


class Ledger:
    """Reads what each tenant was charged: by the admin's usage API, or by a budget of tokens in `/v1/limits`.

    A server that is not Sluice has no accounts here.
    """

    def __init__(self, base: str, keys: Mapping[str, str], admin_url: str = "", admin_key: str = "") -> None:
        """`keys` by the benchmark's names of tenants."""
        self._admin_url, self._admin_key = admin_url.rstrip("/"), admin_key
        self._limits_url = f"{base}/v1/limits"
        self._keys = keys
        self._since = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
        self.names = {name: said["tenant"] for name, key in keys.items() if (said := self._limits(key))}

    @property
    def is_sluice(self) -> bool:
        return bool(self.names)

    def read(self) -> Account:
        """Return the accounts. Raises `OptionError` if an admin port refuses."""
        if self._admin_url:
            return self._of_admin()
        charged = {self.names[name]: self._of_budget(self._keys[name]) for name in self.names}
        return {name: tokens for name, tokens in charged.items() if tokens is not None}

    def read_settled(self, has_cut: bool = False) -> Account:
        """Return the accounts once they no longer change; `has_cut` if streams were cut."""
        account, since = self.read(), time.monotonic()
        until = since + SETTLE_SECONDS
        steady = LEDGER_STEADY_SECONDS if self._admin_url else BUDGET_STEADY_SECONDS if has_cut else 0.0
        while account and time.monotonic() < min(until, since + steady):
            time.sleep(READ_INTERVAL_SECONDS)
            before, account = account, self.read()
            if account != before:
                since = time.monotonic()
        return account

    def _of_admin(self) -> Account:
        url, headers = f"{self._admin_url}/admin/v1/usage", {"authorization": f"Bearer {self._admin_key}"}
        try:
            reply = httpx.get(url, params={"from": self._since}, headers=headers, timeout=READ_TIMEOUT_SECONDS)
            rows = reply.raise_for_status().json()["rows"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise OptionError("--admin-url", self._admin_url, f"tells no usage: {error}") from None
        tokens = {row["tenant"]: row["input_tokens"] + row["output_tokens"] for row in rows}
        return {name: tokens.get(name, 0) for name in self.names.values()}

    def _of_budget(self, key: str) -> int | None:
        said = self._limits(key)
        for entry in said["data"] if said else ():
            if entry["resource"] == "tokens" and entry["per"] in BUDGET_UNITS and "remaining" in entry:
                return int(entry["amount"]) - int(entry["remaining"])
        return None

    def _limits(self, key: str) -> dict[str, Any] | None:
        try:
            headers = {"authorization": f"Bearer {key}"}
            reply = httpx.get(self._limits_url, headers=headers, timeout=READ_TIMEOUT_SECONDS)
            said = reply.json() if reply.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError):
            return None
        return said if isinstance(said, dict) and "kv_memory" in said else None


def settlements(
    exchanges: Iterable[Exchange], names: Mapping[str, str], before: Account, after: Account
) -> list[Settlement]:
    """Compare what answers told with what was charged; `names` are the server's, by the benchmark's."""
    told, cut = dict.fromkeys(before, 0), dict.fromkeys(before, 0)
    for one in exchanges:
        tenant = names.get(one.tenant, "")
        if tenant in told and one.outcome is not Outcome.REFUSED:
            told[tenant] += one.prompt_tokens + one.num_tokens
            cut[tenant] += not one.has_usage or one.outcome is not Outcome.ANSWERED
    return [Settlement(name, told[name], after.get(name, 0) - before[name], cut[name]) for name in before]
