"""Alerts are signed and sent again until a receiver accepts them, or given up."""

import base64
import hmac
from typing import cast

import httpx
import orjson
import pytest

from gateway.settings.secret_rules import webhook_secret
from gateway.tenants.alert_sender import ATTEMPT_SECONDS, RETRY_SECONDS, AlertSender
from quotas.errors import StoreUnavailable
from quotas.policy.limit import Alert, Budget, BudgetPeriod, Limit, Resource, TokenPrices
from quotas.store.budget_alerts import CLAIM_SECONDS, AlertEnd, BudgetAlerts, Crossing, DueAlert

SECRET = b"s" * 24
ALERT = Alert(80, "https://hooks.example.com/T0/secret-path?token=1")
BUDGET = Budget(BudgetPeriod.MONTH)
LIMIT = Limit(Resource.COST, 10**11, BUDGET, None, TokenPrices(1, 1, 1, 1, "EUR"), "research", (ALERT,))
DUE = DueAlert(Crossing(b"sluice:{team:research}", LIMIT, ALERT, 20_000), "acme", 8 * 10**10, 1.7e9, 1.8e9)


class PaperAlerts:
    def __init__(self) -> None:
        self.ends: list[AlertEnd] = []
        self.is_away = False

    async def ended(self, crossing: Crossing, end: AlertEnd) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
        self.ends.append(end)


async def send(replies: list[int | Exception]) -> tuple[AlertSender, PaperAlerts, list[httpx.Request], list[float]]:
    """Have an alert sent to a receiver that answers so."""
    alerts, requests, waits = PaperAlerts(), list[httpx.Request](), list[float]()

    def receive(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply, headers={"location": "http://127.0.0.1/"})

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async with httpx.AsyncClient(transport=httpx.MockTransport(receive)) as client:
        sender = AlertSender(cast(BudgetAlerts, alerts), client, SECRET, wait, lambda: 1_700_000_000.4)
        await sender._send(DUE)
    return sender, alerts, requests, waits


async def test_an_alert_is_signed_over_its_id_its_time_and_its_body() -> None:
    sender, alerts, (request,), _ = await send([204])
    assert (sender.num_sent, sender.num_failed, alerts.ends) == (1, 0, ["sent"])
    assert str(request.url) == ALERT.url and request.headers["webhook-timestamp"] == "1700000000"
    content = f"{request.headers['webhook-id']}.1700000000.".encode() + request.content
    expected = base64.b64encode(hmac.digest(SECRET, content, "sha256")).decode()
    assert request.headers["webhook-signature"] == f"v1,{expected}"
    data = orjson.loads(request.content)["data"]
    assert (data["applies_to"], data["team"], data["tenant"], data["key"]) == ("team", "research", None, None)
    assert (data["amount"], data["used"], data["currency"], data["per"]) == (100.0, 80.0, "EUR", "month")


async def test_what_is_not_accepted_is_sent_again_under_its_id(caplog: pytest.LogCaptureFixture) -> None:
    _, alerts, requests, waits = await send([503, httpx.ConnectError("refused"), 302, 200])
    assert alerts.ends == ["sent"] and waits == [0.0, *RETRY_SECONDS[:3]]
    assert len({request.headers["webhook-id"] for request in requests}) == 1
    assert "hooks.example.com" in caplog.text and "secret-path" not in caplog.text


async def test_an_alert_that_nobody_accepts_is_given_up_within_its_claim() -> None:
    sender, alerts, requests, waits = await send([500] * 6)
    assert (sender.num_sent, sender.num_failed, alerts.ends, len(requests)) == (0, 1, ["failed"], 6)
    assert sum(waits) + 10 * len(requests) < CLAIM_SECONDS


async def test_an_alert_behind_many_dead_receivers_is_left_to_its_next_claim() -> None:
    """Another replica may have claimed it, and would send it twice."""
    alerts, now, at = PaperAlerts(), 0.0, list[float]()

    async def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def receive(request: httpx.Request) -> httpx.Response:
        nonlocal now
        at.append(now)
        now += 200  # of others, until there is a slot again
        return httpx.Response(500)

    async with httpx.AsyncClient(transport=httpx.MockTransport(receive)) as client:
        sender = AlertSender(cast(BudgetAlerts, alerts), client, SECRET, wait, lambda: now)
        await sender._send(DUE)
    assert len(at) == 4 and at[-1] + ATTEMPT_SECONDS <= CLAIM_SECONDS < now
    assert (sender.num_sent, sender.num_failed, alerts.ends) == (0, 0, [])


@pytest.mark.parametrize("text", ["whsec_", "whsec_c2hvcnQ=", "c2VjcmV0" * 6, "whsec_not base64!" * 3])
def test_a_secret_that_is_none_of_standard_webhooks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whsec_ and 24 to 64 bytes"):
        webhook_secret(text)
