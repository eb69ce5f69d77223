"""The page follows a gateway that serves."""

import threading

import httpx

from tests.gateway.admin.page.page_object import PageMaker
from tests.gateway.server_process import PATIENCE, ServerProcess

ENDLESS = {"model": "embedded", "prompt": "Count.", "max_tokens": 1900, "ignore_eos": True, "stream": True}


def test_a_request_is_seen_followed_cancelled_and_remembered(server: ServerProcess, open_tab: PageMaker) -> None:
    heard: list[str] = []

    def listen() -> None:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=ENDLESS, headers=server.headers, timeout=PATIENCE) as reply:
            heard.extend(reply.iter_lines())

    client = threading.Thread(target=listen)
    page = open_tab(server.admin_url)
    client.start()
    page.sign_in(server.admin_key)
    page.until_reads("#live", "decoding")
    page.until("[...document.querySelectorAll('.chart > svg .line')].every(line => line.getAttribute('d') !== null)")
    assert "demo" in page.text("#tenants") and "demo" in page.text(".pool-legend")
    page.click("#live button.id")
    page.until_shown("#request-dialog .kind-decode")
    page.click("#request-dialog .danger")
    page.click("#cancel-dialog .danger")
    page.until_reads("#request-dialog", "failed")
    client.join(PATIENCE)
    page.press("Escape")
    page.click("[name=which][value=recent]")
    page.until_reads("#recent", "cancelled")
    page.click("#tenants tbody button")
    page.until_reads("#tenant-dialog", "Its last requests")
    assert page.complaints() == []
    assert any('"code":"cancelled"' in line for line in heard)
