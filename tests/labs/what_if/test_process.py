import subprocess
import sys

from admission.request import JudgedRequest
from backend.scheduler.sequence import FinishReason
from gateway.admin.recent_traffic import RecentTraffic
from labs.what_if.process import arrivals_of
from tests.gateway.admin.test_recent_traffic import a_request, asked, end


def test_answers_keep_their_lengths_and_cut_ones_have_their_declared_length() -> None:
    whole, cut = a_request(asked("whole"), 0), a_request(asked("cut"), 1)
    open_end, refused = (
        a_request(asked("open", declared=False), 2),
        a_request(asked("refused", refusal="requests/min"), 3),
    )
    traffic = RecentTraffic({open_end})
    traffic.request_ended(refused)
    end(traffic, cut, 3, FinishReason.CANCELLED)
    end(traffic, whole, 11, FinishReason.STOP)
    arrivals = arrivals_of(traffic.within(100.0))
    assert [arrival.output_tokens for arrival in arrivals] == [11, 40, 11, 40]
    assert [arrival.time for arrival in arrivals] == [0, 1, 2, 3]
    first = arrivals[0]
    assert (first.tenant, first.key, first.service_tier, first.body_bytes) == ("acme", "k1", "flex", 123)
    assert (first.prompt_tokens, first.max_tokens, first.deadline) == (7, 40, 0.5)
    assert arrivals[3].refused_by == "requests/min"


def test_an_unread_refusal_asked_for_as_much_as_its_tenants_previous_request() -> None:
    unread = [
        a_request(JudgedRequest.unread(f"unread-{tenant}", tenant, "k2", "requests/min"), 2)
        for tenant in ("acme", "new")
    ]
    traffic = RecentTraffic([a_request(asked("read"), 1), *unread])
    read, like = arrivals_of(traffic.within(100.0))
    assert (like.prompt_tokens, like.max_tokens, like.tenant) == (read.prompt_tokens, read.max_tokens, "acme")
    assert (like.key, like.refused_by) == ("k2", "requests/min")


def test_it_does_not_wait_for_torch() -> None:
    code = "import sys, labs.what_if.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
