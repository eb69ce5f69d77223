from pathlib import Path

import pytest

from fleet.replicas import ReplicasError, read_replicas
from fleet.view import ReplicaAddress


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "replicas.yaml"


def test_a_file_names_replicas(file: Path) -> None:
    file.write_text("replicas:\n- {url: 'http://10.0.0.1:8000', admin: 'https://10.0.0.1:8001'}\n")
    (one,) = read_replicas(file)
    assert one == ReplicaAddress("http://10.0.0.1:8000", "https://10.0.0.1:8001")
    assert one.name == "10.0.0.1:8000"
    file.write_text("replicas: []")
    assert read_replicas(file) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one field `replicas`"),
        ("replicas: {}", "one field `replicas`"),
        ("replicas: [", "not valid YAML"),
        ("replicas: [{url: 'http://a:1'}]", r"replicas\[0\] must have the fields url and admin"),
        ("replicas: [{url: 'http://a:1/v1', admin: 'http://a:2'}]", "url must be http:// or https://"),
        ("replicas: [{url: 'http://a', admin: 'http://a:2'}]", "url must be"),
        ("replicas: [{url: 'http://a:1', admin: 'ftp://a:2'}]", "admin must be"),
        ("replicas: [{url: 'http://u:p@a:1', admin: 3}]", "url must be"),
        ("replicas: [{url: 'http://xn--:1', admin: 'http://a:2'}]", "url must be"),
        ("replicas: [{url: 'http://a:1', admin: 'http://a\u200bb:2'}]", "admin must be"),
        ("replicas: [{url: 'http://a:1', admin: 'http://a:2'}, {url: 'https://a:1', admin: 'http://a:3'}]", "twice"),
    ],
)
def test_a_nonsensical_file_of_replicas_is_refused(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ReplicasError, match=said):
        read_replicas(file)


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(ReplicasError, match="No such file"):
        read_replicas(file)


@pytest.mark.parametrize("host", ["replica-0.replicas", "localhost", "1.2.3"])
def test_where_a_gateway_sends_to_them_they_go_by_address(file: Path, host: str) -> None:
    file.write_text(f"replicas: [{{url: 'http://{host}:1', admin: 'http://x:2'}}]")
    with pytest.raises(ReplicasError, match=r"replicas\[0\] url must have an IP address.*, got 'http://" + host):
        read_replicas(file, by_address=True)
    file.write_text(
        "replicas: [{url: 'http://[::1]:1', admin: 'http://x:2'}, {url: 'http://1.2.3.4:1', admin: 'http://x:2'}]"
    )
    assert [one.name for one in read_replicas(file, by_address=True)] == ["[::1]:1", "1.2.3.4:1"]
