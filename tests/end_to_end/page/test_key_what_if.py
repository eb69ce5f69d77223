"""What an edit of a key would have done to the last hour, by API and in the window where it is edited."""

from pathlib import Path

from tests.end_to_end.page.page_object import PageMaker
from tests.gateway.raw_client import completion
from tests.gateway.server_process import eventually, running_server


def test_a_limit_of_a_key_is_tried_on_the_last_hour_before_it_is_put_into_force(
    tmp_path: Path, open_tab: PageMaker
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tenants: {acme: {}}")
    with running_server(tmp_path, "--policy", str(policy), "--threads", "1") as server:
        made = server.ask_admin("keys", "POST", json={"tenant": "acme", "name": "ci"}).json()
        for _ in range(3):
            assert server.post("/v1/completions", key=made["key"], **completion(max_tokens=2)).is_success
        eventually(lambda: len(server.admin("requests")["recent"]) == 3)
        path, settings = f"keys/{made['id']}/what-if", {"limits": {"requests": {"rate": "1/h", "burst": 1}}}
        answer = server.ask_admin(path, "POST", json={"settings": settings}).json()
        assert (answer["before"]["refused"], answer["after"]["refused"], answer["not_simulated"]) == (0, 2, [])
        assert server.ask_admin("keys/nobody/what-if", "POST", json={"settings": settings}).status_code == 404
        wrong = server.ask_admin(path, "POST", json={"settings": {"limit": {}}})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "settings"

        page = open_tab(server.admin_url, "#/keys")
        page.sign_in(server.admin_key)
        page.until_shown("#keys-table tbody tr")
        page.click(f"#keys-table tbody tr:has-text('{made['id']}') button:has-text('Edit')")
        page.click("#key-what-if")
        page.until_reads("#key-what-if-answer", "Simulated: 3 requests")
        page.resize(800)
        page.until(
            "document.querySelector('#key-dialog').scrollWidth <= document.querySelector('#key-dialog').clientWidth"
        )
        assert server.admin("keys")["keys"][0]["settings"] == {}
