"""A row of the log opens what happened to its request, and what was said, where the tenant has agreed."""

from pathlib import Path

from tests.end_to_end.page.page_object import PageMaker
from tests.gateway.raw_client import completion
from tests.gateway.server_process import eventually, running_server

HOSTILE = "<img src=x onerror=\"document.title='taken'\">\u202e\n  second line"


def test_a_row_opens_its_story_and_its_texts(tmp_path: Path, open_tab: PageMaker) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tenants: {demo: {log_texts: whole}}")
    flags = ("--policy", str(policy), "--threads", "1", "--event-log", str(tmp_path / "events"))
    with running_server(tmp_path, *flags) as server:
        body = completion(max_tokens=2) | {"prompt": HOSTILE}
        (name,) = [server.post("/v1/completions", **body).json()["id"]]
        eventually(lambda: bool(server.admin(f"request-log?id={name}")["requests"]))
        assert server.ask_admin("requests/-x/explanation").status_code == 404

        page = open_tab(server.admin_url, "#/log")
        page.sign_in(server.admin_key)
        page.until_shown("#log-table tbody tr")
        page.click("#log-table tbody tr button.id")
        page.click("#request-dialog #explain")
        page.until_reads("#request-dialog [role=status]", "Why")
        page.until_reads("#request-dialog pre", "admitted")
        page.click("#request-dialog #texts")
        page.until_reads("#request-dialog pre", "onerror")
        page.until_reads("#request-dialog pre", "\u2039U+202E\u203a\n  second line")
        assert page.count("#request-dialog img") == 0
        assert page.js("document.title") != "taken"
        page.resize(800)
        page.until("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('#request-dialog'))")
        page.click("#request-dialog .heading button")
        page.click("#sign-out")
        page.until_shown("#sign-in")
        assert "onerror" not in page.js("document.body.textContent"), "nobody who signs in next sees it"
