import json
import shlex
from dataclasses import replace

import pytest

from gateway.announcement import Ready

READY = Ready(
    version="1.2.3",
    host="127.0.0.1",
    port=8000,
    tls=False,
    model="sluice-tiny",
    num_parameters=2_560_704,
    dtype="float32",
    device="cpu",
    num_blocks=100,
    kv_tokens=1600,
    kv_bytes=4 * 2**20,
    max_model_len=1024,
    batch_invariant=True,
    demo_key="sk-sluice-demo-0123",
)


def test_it_names_address_model_memory_and_key() -> None:
    text = str(READY)
    assert "http://127.0.0.1:8000" in text
    assert "sluice-tiny: 2.56 M parameters, float32, on cpu" in text
    assert "4MiB: 1,600 tokens in 100 blocks, at most 1,024 tokens a request" in text
    assert "sk-sluice-demo-0123" in text


def test_it_says_so_where_a_seed_is_not_enough_for_the_same_text() -> None:
    assert "seeds" not in str(READY)
    assert "seeds     may draw other text beside other requests" in str(replace(READY, batch_invariant=False))


def test_the_curl_is_one_line_that_a_shell_reads_as_a_streaming_request() -> None:
    (line,) = [line for line in str(READY).splitlines() if line.startswith("curl")]
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sk-sluice-demo-0123" in words
    assert json.loads(words[-1])["stream"] is True


@pytest.mark.parametrize("name", ["it's", 'a "quoted" name', "$HOME"])
def test_the_curl_survives_awkward_names_and_keys(name: str) -> None:
    words = shlex.split(replace(READY, model=name, demo_key="it's-a-'key'").curl())
    assert json.loads(words[-1])["model"] == name
    assert "Authorization: Bearer it's-a-'key'" in words


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("0.0.0.0", False, "http://127.0.0.1:8000"),
        ("::", False, "http://[::1]:8000"),
        ("::1", True, "https://[::1]:8000"),
        ("gateway.example", True, "https://gateway.example:8000"),
    ],
)
def test_the_url_can_be_reached_from_this_machine(host: str, tls: bool, url: str) -> None:
    assert replace(READY, host=host, tls=tls).url == url


def test_without_a_demo_key_the_curl_leaves_a_place_for_one() -> None:
    ready = replace(READY, demo_key=None)
    assert "Bearer YOUR_KEY" in ready.curl()
    assert "demo key" not in str(ready)


def test_the_admin_plane_is_named_with_where_its_key_is() -> None:
    ready = replace(READY, admin_port=8001, admin_host="0.0.0.0", admin_key="/state/admin-key")
    assert "admin     http://127.0.0.1:8001, its key in /state/admin-key" in str(ready)
    assert "admin" not in str(READY)


def test_the_demo_key_is_not_in_the_representation() -> None:
    assert "0123" not in repr(READY)


def test_it_says_that_tools_are_told_by_a_text_of_ours() -> None:
    assert "told by a text of ours" in str(replace(READY, default_tools=True))
    assert "tools" not in str(READY)


def test_http_workers_are_counted_where_there_are_any() -> None:
    assert "HTTP      2 workers\n" in str(replace(READY, num_http_workers=2))
    assert "worker" not in str(READY)
