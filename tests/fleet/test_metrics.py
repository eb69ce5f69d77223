import re

from tests.fleet.paper_fleet import PaperFleet, answering, whole
from tests.gateway.server_process import ROOT


async def test_the_documented_metrics_are_the_existing_ones() -> None:
    fleet = PaperFleet(a=answering(whole()))
    await fleet.request()
    documented = re.findall(r"^\| `(sluice_route_\w+)` \|", (ROOT / "docs" / "fleet.md").read_text(), re.MULTILINE)
    text = (await fleet.metrics.text()).decode()
    assert {*re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)} == {*documented}
    assert 'sluice_route_requests_total{outcome="completed"} 1' in text
    assert 'sluice_route_attempts_total{replica="a:8000"} 1' in text
