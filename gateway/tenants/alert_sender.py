"""Sends the alerts of budgets to their receivers, signed as Standard Webhooks are, beside the requests.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx
import orjson

from gateway.settings.secret_rules import webhook_secret
from gateway.settings.settings import Settings
from gateway.tenants.key_store import KeyStore
from quotas.errors import QuotaError
from quotas.store.budget_alerts import CLAIM_SECONDS, AlertEnd, BudgetAlerts, DueAlert

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 5.0, 30.0, 120.0, 480.0)  # waits before further attempts; all together end within a claim
ATTEMPT_SECONDS = 10.0  # the longest time of one attempt
MAX_SENDING = 64  # alerts that are being sent at once; others wait for these


class AlertSender:
    """Sends what `BudgetAlerts` finds due. Each alert is a task of its own, so that no request waits for a receiver."""

    def __init__(
        self,
        alerts: BudgetAlerts,
        client: httpx.AsyncClient,
        secret: bytes,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`secret` signs; `clock` is in Unix seconds."""
        self.num_sent = self.num_failed = 0
        self._alerts = alerts
        self._client = client
        self._secret = secret
        self._sleep = sleep
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_SENDING)

    def send_soon(self, due: DueAlert) -> None:
        task = asyncio.create_task(self._send(due))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop sending. What was not sent is sent by another replica once the claim has run out."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _send(self, due: DueAlert) -> None:
        crossing, body = due.crossing, orjson.dumps(message(due))
        host = urlsplit(crossing.alert.url).hostname
        what = f"alert at {crossing.alert.percent}% of {crossing.limit.name} of {due.tenant} to {host}"
        end: AlertEnd = "failed"
        claimed = self._clock()
        for wait in (0.0, *RETRY_SECONDS):
            await self._sleep(wait)
            async with self._slots:
                if self._clock() - claimed > CLAIM_SECONDS - ATTEMPT_SECONDS:  # it may be another replica's by now
                    log.warning(
                        "the %s is not delivered yet: attempts of other alerts took the time of its claim", what
                    )
                    return
                problem = await self._attempt(crossing.alert.url, crossing.id, body)
            if problem is None:
                end = "sent"
                break
            log.warning("the %s is not delivered yet: %s", what, problem)
        self.num_sent += end == "sent"
        self.num_failed += end == "failed"
        log.log(logging.INFO if end == "sent" else logging.ERROR, "the %s is %s", what, end)
        with suppress(QuotaError):  # then the claim runs out, and it is sent once more under its id
            await self._alerts.ended(crossing, end)

    async def _attempt(self, url: str, id_: str, body: bytes) -> str | None:
        """Returns why it was not accepted; None if it was."""
        headers = signed(self._secret, id_, round(self._clock()), body) | {"content-type": "application/json"}
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                async with self._client.stream("POST", url, content=body, headers=headers) as reply:
                    return None if reply.is_success else f"the receiver answered {reply.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
            return type(error).__name__


def message(due: DueAlert) -> dict[str, object]:
    """The body of an alert."""
    crossing = due.crossing
    limit, budget = crossing.limit, crossing.limit.window
    assert budget is not None
    return {
        "type": "budget.reached",
        "timestamp": _moment(due.now),
        "data": {
            "applies_to": limit.owner,
            "team": limit.team,
            "tenant": None if limit.team else due.tenant,
            "key": limit.key,
            "resource": limit.resource.value,
            "per": budget.unit,
            "at_percent": crossing.alert.percent,
            "amount": limit.number(limit.amount),
            "used": limit.number(due.used),
            "currency": limit.currency,
            "soft": limit.is_soft,
            "resets_at": _moment(due.resets_at),
        },
    }


def signed(secret: bytes, id_: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers by which a receiver knows the sender, and a repetition."""
    digest = hmac.digest(secret, f"{id_}.{timestamp}.".encode() + body, "sha256")
    signature = base64.b64encode(digest).decode()
    return {"webhook-id": id_, "webhook-timestamp": str(timestamp), "webhook-signature": f"v1,{signature}"}


@asynccontextmanager
async def open_alert_sender(settings: Settings, alerts: BudgetAlerts) -> AsyncIterator[AlertSender]:
    """Send the alerts that become due while the block runs. Raises `KeyStoreError`."""
    given = settings.webhook_secret
    secret = KeyStore(settings.state_dir).webhook_secret() if given is None else given.get_secret_value()
    async with httpx.AsyncClient(follow_redirects=False, timeout=ATTEMPT_SECONDS) as client:
        sender = AlertSender(alerts, client, webhook_secret(secret))
        alerts.on_due = sender.send_soon
        try:
            yield sender
        finally:
            alerts.on_due = None
            await sender.close()


def _moment(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
