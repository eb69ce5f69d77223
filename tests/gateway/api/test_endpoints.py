"""The endpoints that answer at once, on a live server."""

from typing import Any

import httpx
import pytest

from gateway.version import VERSION
from tests.gateway.server_process import ServerProcess


def post(server: ServerProcess, path: str, **body: object) -> Any:
    reply = server.post(path, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("text", ["Count from 3 to 12.", " two  spaces ", "naïve 日本 🧿", "a"])
def test_tokens_lead_back_to_their_text(server: ServerProcess, text: str) -> None:
    tokenized = post(server, "/tokenize", prompt=text, add_special_tokens=False)
    assert tokenized["count"] == len(tokenized["tokens"]) > 0
    assert tokenized["max_model_len"] == 2048
    assert post(server, "/detokenize", tokens=tokenized["tokens"]) == {"prompt": text}


def test_a_conversation_is_tokenized_as_chat_would_see_it(server: ServerProcess) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to 3."}]
    tokens = post(server, "/tokenize", messages=messages)["tokens"]
    prompt = post(server, "/detokenize", tokens=tokens)["prompt"]
    assert prompt.index("Be brief.") < prompt.index("Count to 3.")
    open_ended = post(server, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert tokens[: len(open_ended)] == open_ended
    chat = post(server, "/v1/chat/completions", model="embedded", messages=messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == len(tokens)


def test_tokens_are_shown_as_strings_when_asked(server: ServerProcess) -> None:
    plain = post(server, "/tokenize", prompt="a b")
    shown = post(server, "/tokenize", prompt="a b", return_token_strs=True)
    assert plain["token_strs"] is None
    assert len(shown["token_strs"]) == shown["count"]


def test_an_empty_text_has_only_its_special_tokens(server: ServerProcess) -> None:
    assert post(server, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_has_no_tokens_here(server: ServerProcess, path: str) -> None:
    body = {"model": "gpt-4", "prompt": "a"} if path == "/tokenize" else {"model": "gpt-4", "tokens": [5]}
    reply = server.post(path, **body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/startupz", "/livez", "/readyz", "/health", "/ping"])
def test_health_needs_no_key(server: ServerProcess, path: str) -> None:
    reply = httpx.get(f"{server.url}{path}")
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")


def test_the_version_needs_no_key(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": VERSION}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/embedded"])
def test_the_models_need_a_key(server: ServerProcess, path: str) -> None:
    assert server.get(path).status_code == 200
    assert httpx.get(f"{server.url}{path}").json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info", "/model_info", "/get_model_info"])
def test_the_served_model_is_told_to_any_key_and_not_without_one(server: ServerProcess, path: str) -> None:
    assert server.get(path).json()["model_path"] == "embedded"
    assert httpx.get(f"{server.url}{path}").json()["error"]["code"] == "invalid_api_key"


def test_the_load_of_all_is_told_on_the_admin_port_alone_unless_it_is_public(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/v1/loads").json()["error"]["code"] == "invalid_api_key"
    reply = server.get("/v1/loads")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "insufficient_permissions")
    url = f"{server.admin_url}/v1/loads"
    assert httpx.get(url).status_code == httpx.get(url, headers=server.headers).status_code == 401
    (load,) = httpx.get(url, headers=server.admin_headers).json()["loads"]
    assert load["max_total_num_tokens"] > 0


def test_a_models_card_says_how_long_a_request_may_be(server: ServerProcess) -> None:
    card = server.get("/v1/models/embedded").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("embedded", "model", 2048)
    assert server.get("/v1/models").json() == {"object": "list", "data": [card]}


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/metrics", "/nowhere"])
def test_every_answer_has_a_request_id_of_its_own(server: ServerProcess, path: str) -> None:
    ids = {server.get(path).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
