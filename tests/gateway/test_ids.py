import time

import pytest

from gateway.ids import new_id


def test_ids_are_random_and_in_the_order_of_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str]()
    for second in (1_764_331_200.9, 1_764_331_201.0, 2**32 - 1):
        monkeypatch.setattr(time, "time", lambda now=second: now)
        found += sorted(new_id("resp_", 24) for _ in range(50))
    assert found == sorted(found) and len(set(found)) == 150
    assert {len(one) for one in found} == {len("resp_") + 48} and len({one[-40:] for one in found}) == 150
